"""Measurements disturbed by other programs are repeated; if all are disturbed, the least disturbed one counts."""

import itertools
import subprocess
import sys
import time

import pytest

from benchmarks import quiet
from benchmarks.quiet import busy_seconds, undisturbed


def others_take(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Other programs take so many CPU seconds during the first, second, ... try, and none later."""
    clock = itertools.chain(*((0.0, taken) for taken in seconds), itertools.repeat(0.0))
    monkeypatch.setattr(quiet, "busy_seconds", lambda: next(clock))


@pytest.mark.parametrize(
    ("others", "counts", "disturbed"),
    [
        ((0.0,), 1, False),
        ((quiet.TICK_SECONDS,), 1, False),
        ((1.0, 1.0), 3, False),
        ((900.0, 1.0, 800.0), 2, True),  # on a machine that never rests, the least disturbed try
    ],
)
def test_disturbed_work_is_done_again(others, counts, disturbed, monkeypatch: pytest.MonkeyPatch):
    others_take(monkeypatch, *others)
    calls = itertools.count(1)
    taken = undisturbed(lambda: next(calls), tries=3)
    assert (taken.result, taken.disturbed) == (counts, disturbed)


def test_wall_and_cpu_are_those_of_the_work(monkeypatch: pytest.MonkeyPatch):
    others_take(monkeypatch, 0.0)
    taken = undisturbed(lambda: time.sleep(0.05))
    assert taken.wall_seconds >= 0.05
    assert taken.cpu_seconds < 0.04


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what the whole machine has used")
def test_what_another_process_burns_shows():
    before = busy_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(8_000_000))"], check=True)
    assert busy_seconds() - before > 0.05
