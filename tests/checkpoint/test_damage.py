"""A truncated, changed or missing file is detected and named, and the previous checkpoint is loaded."""

from __future__ import annotations

import random
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import pipepart
from pipepart.checkpoint.manifest import MANIFEST, Manifest
from tests.checkpoint.training import model, training
from tests.support import plain
from tests.support.seeds import seeds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of step 1 and of step 2."""
    with (made := training()).pipe:
        for step in (1, 2):
            made.train(step - 1, step)
            made.save(tmp_path / "run", step)
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_falls_back(folder: Path, path: Path, words: str) -> None:
    """The newest checkpoint is refused for a file, and the one before is loaded with a warning of it."""
    with pytest.raises(pipepart.CheckpointError, match=words):
        pipepart.load(folder / "step-2", model())
    with pytest.warns(UserWarning, match=f"step-1' is loaded.*{re.escape(path.name)}"):
        assert pipepart.load(folder, model()).step == 1


def test_truncations_and_flips_and_missing_files_are_found_and_named(folder: Path) -> None:
    """Even a space in the manifest counts."""
    files = sorted((folder / "step-2").iterdir())
    sound = {path: path.read_bytes() for path in files}
    for number, seed in enumerate(seeds(60, "damage")):
        draw = random.Random(seed)
        path = files[number % len(files)]
        content = bytearray(sound[path])
        place = draw.randrange(len(content))
        if number % 2:
            content[place] ^= 1 << draw.randrange(8)
        else:
            del content[place:]
        path.write_bytes(content)
        check_falls_back(folder, path, re.escape(str(path)))
        path.write_bytes(sound[path])
    for path in files:
        path.unlink()
        check_falls_back(folder, path, re.escape(f"{str(path)!r} is missing"))
        path.write_bytes(sound[path])
    manifest = folder / "step-2" / MANIFEST
    manifest.write_bytes(sound[manifest].replace(b'"step": 2', b'"step":  2'))
    check_falls_back(folder, manifest, r"manifest\.json.* is damaged")
    manifest.write_bytes(sound[manifest])
    assert pipepart.load(folder, model()).step == 2


def test_if_none_is_sound_all_are_named_and_nothing_changes(folder: Path) -> None:
    module = model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for step in ("step-1", "step-2"):
        (folder / step / "rank-0.json").write_bytes(b"{}")
    with pytest.raises(pipepart.CheckpointError, match=r"step-2.rank-0\.json.*step-1.rank-0\.json"):
        pipepart.load(folder, module)
    plain.assert_same(module.state_dict(), before)


def test_the_link_to_the_latest_is_followed(folder: Path) -> None:
    assert pipepart.load(folder / "latest", model()).path == folder / "step-2"
    (folder / "step-2" / "manifest.json").unlink()
    with pytest.raises(pipepart.CheckpointError, match=r"step-2.manifest\.json' is missing"):
        pipepart.load(folder / "latest", model())


def test_a_directory_in_the_place_of_the_link_is_refused_before_anything_is_written(folder: Path) -> None:
    """As a copy that follows links has one."""
    (folder / "latest").unlink()
    (folder / "latest").mkdir()
    with pytest.raises(ValueError, match=r"latest' is a directory.* remove it"):
        pipepart.save(folder, model(), step=99)
    assert names(folder) == ["latest", "step-1", "step-2"]
    assert pipepart.load(folder, model()).step == 2


def test_what_is_no_checkpoint_does_no_harm_and_what_was_not_finished_is_removed_by_the_next_save(
    folder: Path,
) -> None:
    (folder / "step-2" / "tokenizer.json").write_text("{}")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step-9")
    (folder / "step-10").write_text("no directory")
    (folder / "step-007").mkdir()
    shutil.copytree(folder / "step-2", folder / "step-3.tmp-0a1b")
    (folder / "latest.tmp-0a1b").symlink_to("step-3")
    assert pipepart.load(folder, model()).step == 2
    pipepart.save(folder, model(), step=3)
    assert names(folder) == ["latest", "step-007", "step-1", "step-10", "step-2", "step-3"]


def test_a_training_that_comes_to_a_damaged_step_again_puts_it_aside(folder: Path) -> None:
    (folder / "step-2" / "rank-0.json").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"put aside as 'step-2\.broken-\w+'.*rank-0\.json"):
        pipepart.save(folder, model(), step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipepart.load(folder, model()).step == 2


def test_the_last_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        pipepart.save(tmp_path, model(), step=step, keep=2)
    assert names(tmp_path) == ["latest", "step-3", "step-4"]
    assert (tmp_path / "latest").resolve() == tmp_path / "step-4"


def test_the_loaded_tensors_are_not_the_file(folder: Path) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), amsgrad=True)
    pipepart.load(folder, module, optimizer)

    def loaded() -> list[torch.Tensor]:
        return [*module.state_dict().values(), *(state["exp_avg"] for state in optimizer.state.values())]

    before = [value.clone() for value in loaded()]
    for path in (folder / "step-2").glob("*.safetensors"):
        with path.open("r+b") as file:
            file.write(b"\xff" * path.stat().st_size)
    assert all(one.equal(other) for one, other in zip(loaded(), before, strict=True))


@pytest.mark.parametrize(
    "name", ["model-x/../../../model-secret.safetensors", "/model-secret.safetensors", "..", ""]
)
def test_a_path_to_another_directory_is_refused(name: str, tmp_path: Path):
    pipepart.save(tmp_path / "run", torch.nn.Linear(2, 2), step=1)
    directory = tmp_path / "run" / "step-1"
    manifest = Manifest.read(directory)
    one = manifest.files["model-00001-of-00001.safetensors"]
    forged = manifest.model_copy(update={"files": {**manifest.files, name: one}}).sealed()
    (directory / MANIFEST).write_bytes(forged.content())
    with pytest.raises(pipepart.CheckpointError, match="it is no manifest that this one reads"):
        pipepart.load(tmp_path / "run", torch.nn.Linear(2, 2))
