"""A checkpoint written in the background has the values at the time of ``save``, and its errors are not lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch import nn

import pipepart
from pipepart.checkpoint import saving
from tests.checkpoint.training import model, training
from tests.support import plain
from tests.support.processes import run_script


def test_the_values_are_those_of_the_call_and_the_files_those_of_a_save_that_waits(tmp_path: Path) -> None:
    with (made := training()).pipe, (other := training()).pipe:
        made.train(0, 2)
        wanted = made.state()
        waited = made.save(tmp_path / "waited", 2).join()
        begun = made.save(tmp_path / "begun", 2, asynchronous=True)
        made.train(2, 4)
        assert begun.join() == tmp_path / "begun" / "step-2"
        assert begun.done
        other.load(tmp_path / "begun")
        plain.assert_same(other.state(), wanted)
    one, two = ({file.name: file.read_bytes() for file in path.iterdir()} for path in (waited, begun.path))
    assert one == two


def failing(folder: Path, pipe: object) -> pipepart.checkpoint.Saving:
    """Begin a save whose last rename fails, as a file is in its way."""
    folder.mkdir(exist_ok=True)
    (folder / "step-1").touch()
    begun = pipepart.save(folder, pipe, step=1, asynchronous=True)  # type: ignore[arg-type]
    while not begun.done:
        pass
    return begun


def test_the_error_reaches_join_or_the_next_save_or_close_once(tmp_path: Path) -> None:
    module, other, made = model(), model(), training()
    begun = failing(tmp_path, module)
    with pytest.raises(OSError, match="step-1") as caught:
        begun.join()
    assert f"while {str(tmp_path / 'step-1')!r} was written in the background" in caught.value.__notes__
    pipepart.checkpoint.finish(module)  # it was raised already
    (tmp_path / "step-1").unlink()
    assert pipepart.save(tmp_path, module, step=2, asynchronous=True).join().name == "step-2"
    failing(tmp_path / "again", module)
    pipepart.save(tmp_path / "other", other, step=1)  # of another model
    with pytest.raises(OSError, match="step-1"):
        pipepart.save(tmp_path / "next", module, step=2)
    pipepart.save(tmp_path / "next", module, step=2)
    failing(tmp_path / "pipe", made.pipe)
    with pytest.raises(OSError, match="step-1"):
        made.pipe.close()
    made.pipe.close()


SCRIPT = """
import resource, signal, sys
from pathlib import Path
from torch import nn
import pipepart
folder, case, module = Path({folder!r}), {case!r}, nn.Linear(100, 100)
pipepart.save(folder, module, step=1)
if case == "in the way":
    (folder / "step-2").touch()
if case.startswith("full"):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    saving = pipepart.save(folder, module, step=2, asynchronous=case != "full at once")
    if case == "full":
        saving.join()
except OSError as error:
    sys.exit(str(error))
"""
ENDS = {
    "undisturbed": (0, "", 2),
    "in the way": (0, "NotADirectoryError", 1),
    "full": (1, "File too large", 1),
    "full at once": (1, "File too large", 1),
}


@pytest.mark.parametrize("case", [*list(ENDS)[:3], pytest.param("full at once", marks=pytest.mark.slow)])
def test_a_process_that_ends_finishes_its_checkpoint_or_tells_why_not(tmp_path: Path, case: str) -> None:
    """A full disk leaves the checkpoint before."""
    status, says, step = ENDS[case]
    ended = run_script(SCRIPT.format(folder=str(tmp_path), case=case))
    assert ended.returncode == status, ended.stderr
    assert says in ended.stderr
    assert bool(says) == bool(ended.stderr)
    assert pipepart.load(tmp_path / "latest", nn.Linear(100, 100)).step == step
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_save_leaves_what_another_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun, may_write = threading.Event(), threading.Event()
    write = saving.write_tensors

    def late(*args):
        if not begun.is_set():
            begun.set()
            assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(saving, "write_tensors", late)
    first = pipepart.save(tmp_path, nn.Linear(2, 2), step=1, asynchronous=True)
    assert begun.wait(60)
    pipepart.save(tmp_path, nn.Linear(3, 3), step=2)
    may_write.set()
    first.join()
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", "latest"}
    assert pipepart.load(first.path, nn.Linear(2, 2)).step == 1
    assert pipepart.load(tmp_path, nn.Linear(3, 3)).step == 2
