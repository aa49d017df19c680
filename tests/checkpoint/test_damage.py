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
from tests.checkpoint.training import assert_equal, model, training
from tests.support.seeds import seeds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints: the weights of the first are those of the model, plus one in the second."""
    with (made := training()).pipe:
        made.train(0, 1)
        pipepart.save(tmp_path / "run", made.pipe, made.optimizer, step=1, scheduler=made.scheduler)
        made.train(1, 2)
        pipepart.save(tmp_path / "run", made.pipe, made.optimizer, step=2, scheduler=made.scheduler)
    return tmp_path / "run"


def test_truncations_and_flips_are_found_and_named(folder: Path) -> None:
    module = model()
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
        with pytest.raises(pipepart.CheckpointError, match=re.escape(str(path))):
            pipepart.load(folder / "step-2", module)
        with pytest.warns(UserWarning, match=re.escape(str(path))):
            assert pipepart.load(folder, module).step == 1
        path.write_bytes(sound[path])
    assert pipepart.load(folder, module).step == 2


def test_missing_files_are_named(folder: Path) -> None:
    module = model()
    for path in sorted((folder / "step-2").iterdir()):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(pipepart.CheckpointError, match=re.escape(f"{str(path)!r} is missing")):
            pipepart.load(folder / "step-2", module)
        with pytest.warns(UserWarning, match=f"step-1' is loaded.*{re.escape(path.name)}"):
            assert pipepart.load(folder, module).step == 1
        path.write_bytes(content)


def test_if_none_is_sound_all_are_named_and_nothing_changes(folder: Path) -> None:
    module = model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for step in ("step-1", "step-2"):
        (folder / step / "rank-0.json").write_bytes(b"{}")
    with pytest.raises(pipepart.CheckpointError, match=r"step-2.rank-0\.json.*step-1.rank-0\.json"):
        pipepart.load(folder, module)
    assert_equal(module.state_dict(), before)


def test_the_link_to_the_latest_is_followed(folder: Path) -> None:
    assert pipepart.load(folder / "latest", model()).path == folder / "step-2"
    (folder / "step-2" / "manifest.json").unlink()
    with pytest.raises(pipepart.CheckpointError, match=r"step-2.manifest\.json' is missing"):
        pipepart.load(folder / "latest", model())


def test_a_directory_in_the_place_of_the_link_is_refused_before_anything_is_written(folder: Path) -> None:
    """As a copy that follows links has one."""
    (folder / "latest").unlink()
    (folder / "latest").mkdir()
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ValueError, match=r"latest' is a directory.* remove it"):
        pipepart.save(folder, model(), step=99)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert pipepart.load(folder, model()).step == 2


def test_a_file_too_many_and_a_wrong_link_do_no_harm(folder: Path) -> None:
    (folder / "step-2" / "tokenizer.json").write_text("{}")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step-9")
    (folder / "step-10").write_text("no directory")
    (folder / "step-007").mkdir()
    assert pipepart.load(folder, model()).step == 2


def test_directories_that_were_not_finished_are_never_taken_and_removed_by_the_next_save(
    folder: Path,
) -> None:
    module = model()
    shutil.copytree(folder / "step-2", folder / "step-3.tmp-0a1b")
    (folder / "latest.tmp-0a1b").symlink_to("step-3")
    assert pipepart.load(folder, module).step == 2
    pipepart.save(folder, module, step=3)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-1", "step-2", "step-3"]


def test_a_training_that_comes_to_a_damaged_step_again_puts_it_aside(folder: Path) -> None:
    (folder / "step-2" / "rank-0.json").write_bytes(b"")
    module = model()
    with pytest.warns(UserWarning, match="step-1' is loaded"):
        assert pipepart.load(folder, module).step == 1
    with pytest.warns(UserWarning, match=r"put aside as 'step-2\.broken-\w+'.*rank-0\.json"):
        pipepart.save(folder, module, step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipepart.load(folder, module).step == 2


def test_the_last_are_kept(tmp_path: Path) -> None:
    module = model()
    for step in range(5):
        pipepart.save(tmp_path, module, step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3", "step-4"]
    assert (tmp_path / "latest").resolve() == tmp_path / "step-4"


def test_files_are_hashed_as_they_lie_and_not_as_they_are_loaded(folder: Path) -> None:
    """Even a space in the manifest counts."""
    manifest = folder / "step-2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 2', b'"step":  2'))
    with pytest.raises(pipepart.CheckpointError, match=r"manifest\.json.* is damaged"):
        pipepart.load(folder / "step-2", model())


def test_the_loaded_tensors_are_not_the_file(folder: Path) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), amsgrad=True)
    pipepart.load(folder, module, optimizer)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    averages = [state["exp_avg"].clone() for state in optimizer.state.values()]
    for path in (folder / "step-2").glob("*.safetensors"):
        with path.open("r+b") as file:
            file.write(b"\xff" * path.stat().st_size)
    assert_equal(module.state_dict(), before)
    assert all(one["exp_avg"].equal(two) for one, two in zip(optimizer.state.values(), averages, strict=True))


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
