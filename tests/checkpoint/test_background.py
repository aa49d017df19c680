"""A checkpoint written in the background has the values at the time of ``save``, and its errors are not lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch import nn

import pipepart
from pipepart.checkpoint import directories, saving
from tests.checkpoint.training import assert_equal, model, training
from tests.support.processes import run_script


def test_the_values_are_those_of_the_call(tmp_path: Path) -> None:
    with (made := training()).pipe, (other := training()).pipe:
        made.train(0, 2)
        wanted = made.state()
        begun = pipepart.save(
            tmp_path, made.pipe, made.optimizer, step=2, scheduler=made.scheduler, asynchronous=True
        )
        made.train(2, 4)
        assert begun.join() == tmp_path / "step-2"
        assert begun.done
        pipepart.load(tmp_path, other.pipe, other.optimizer, scheduler=other.scheduler)
        assert_equal(other.state(), wanted)


def test_the_files_are_those_of_a_save_that_waits(tmp_path: Path) -> None:
    module = model()
    paths = [
        pipepart.save(tmp_path / str(asynchronous), module, step=0, asynchronous=asynchronous).join()
        for asynchronous in (False, True)
    ]
    files = [{path.name: path.read_bytes() for path in directory.iterdir()} for directory in paths]
    assert files[0] == files[1]


def failing(folder: Path, pipe: object) -> pipepart.checkpoint.Saving:
    """Begin a save whose last rename fails, as a file is in its way."""
    (folder / "step-1").touch()
    begun = pipepart.save(folder, pipe, step=1, asynchronous=True)  # type: ignore[arg-type]
    while not begun.done:
        pass
    return begun


def test_the_error_reaches_join_and_the_folder_can_be_used_again(tmp_path: Path) -> None:
    module = model()
    begun = failing(tmp_path, module)
    with pytest.raises(OSError, match="step-1") as caught:
        begun.join()
    assert f"while {str(tmp_path / 'step-1')!r} was written in the background" in caught.value.__notes__
    pipepart.checkpoint.finish(module)  # it was raised already
    (tmp_path / "step-1").unlink()
    assert pipepart.save(tmp_path, module, step=2, asynchronous=True).join().name == "step-2"


def test_the_error_reaches_the_next_save_once(tmp_path: Path) -> None:
    module, other = model(), model()
    failing(tmp_path, module)
    pipepart.save(tmp_path / "other", other, step=1)  # of another model
    with pytest.raises(OSError, match="step-1"):
        pipepart.save(tmp_path / "next", module, step=2)
    pipepart.save(tmp_path / "next", module, step=2)


def test_the_error_reaches_close(tmp_path: Path) -> None:
    made = training()
    failing(tmp_path, made.pipe)
    with pytest.raises(OSError, match="step-1"):
        made.pipe.close()
    made.pipe.close()


SCRIPT = """
from torch import nn
from pathlib import Path
import pipepart
folder = Path({folder!r})
if {fails}:
    (folder / "step-1").touch()
module = nn.Linear(500, 500)
pipepart.save(folder, module, step=1, asynchronous=True)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_ends_finishes_its_checkpoint_or_tells_why_not(tmp_path: Path, fails: bool) -> None:
    ended = run_script(SCRIPT.format(folder=str(tmp_path), fails=fails))
    assert ("NotADirectoryError" in ended.stderr) == fails
    assert ended.returncode == 0
    if not fails:
        assert pipepart.load(tmp_path, nn.Linear(500, 500)).step == 1


FULL = """
import resource, signal, sys
from torch import nn
import pipepart
module = nn.Linear(100, 100)
pipepart.save({folder!r}, module, step=1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    pipepart.save({folder!r}, module, step=2, asynchronous={asynchronous}).join()
except OSError as error:
    sys.exit("File too large" in str(error))
"""


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_full_disk_is_an_error_and_leaves_the_checkpoint_before(tmp_path: Path, asynchronous: bool) -> None:
    ended = run_script(FULL.format(folder=str(tmp_path), asynchronous=asynchronous))
    assert ended.returncode == 1, ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert pipepart.load(tmp_path, nn.Linear(100, 100)).step == 1


def test_a_save_leaves_what_another_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun, may_write = threading.Event(), threading.Event()
    write = saving.write_tensors

    def late(*args):
        if not begun.is_set():
            begun.set()
            assert may_write.wait(20)
        return write(*args)

    monkeypatch.setattr(saving, "write_tensors", late)
    first = pipepart.save(tmp_path, nn.Linear(2, 2), step=1, asynchronous=True)
    assert begun.wait(20)
    pipepart.save(tmp_path, nn.Linear(3, 3), step=2)
    may_write.set()
    first.join()
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", "latest"}
    assert pipepart.load(first.path, nn.Linear(2, 2)).step == 1
    assert pipepart.load(tmp_path, nn.Linear(3, 3)).step == 2


def test_what_a_process_left_that_ended_is_removed(tmp_path: Path):
    (tmp_path / "step-1.tmp-00000000").mkdir()
    (tmp_path / "latest.tmp-00000000").symlink_to("step-1")
    made = directories.begin(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [made]
    directories.remove(made)
