"""Two saves into one folder at once: neither removes what the other is writing."""

import threading
from pathlib import Path

import pytest
from torch import nn

import pipepart
from pipepart.checkpoint import directories, saving


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
