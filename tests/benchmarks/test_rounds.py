"""Turns: every contender steps in every round, timed once, and nobody always goes first."""

import itertools
import time

import pytest
from torch import Tensor

from benchmarks import rounds
from benchmarks.contender import InThisProcess
from benchmarks.rounds import Samples, interleave


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "busy_seconds", lambda: 0.0)


class Sleeper(InThisProcess):
    def __init__(self, name: str, seconds: float, diary: list[str]) -> None:
        self.name, self._seconds, self._diary = name, seconds, diary

    def step(self) -> None:
        self._diary.append(self.name)
        time.sleep(self._seconds)

    def gradients(self) -> dict[str, Tensor]:
        return {}


def test_each_round_warms_and_times_every_contender_and_turns_the_order():
    diary: list[str] = []
    interleave([Sleeper(name, 0, diary) for name in "abc"], rounds=3)
    assert "".join(diary) == "aabbcc" + "bbccaa" + "ccaabb"


def test_only_the_second_step_of_a_turn_is_timed():
    samples = interleave([Sleeper("slow", 0.02, [])], rounds=2)["slow"]
    assert len(samples.wall_seconds) == 2
    assert all(0.02 <= seconds < 0.04 for seconds in samples.wall_seconds)


def test_sleeping_burns_no_cpu():
    samples = interleave([Sleeper("slow", 0.02, [])], rounds=3)["slow"]
    assert samples.cpu < 0.01


def test_the_median_ignores_a_disturbed_round():
    assert Samples(wall_seconds=[1.0, 9.0, 2.0]).wall == pytest.approx(2.0)


def test_a_disturbed_step_is_taken_again_and_not_kept(monkeypatch: pytest.MonkeyPatch):
    # Somebody takes a whole second during the first timed step, and nothing later.
    busy = itertools.chain([0.0, 1.0], itertools.repeat(1.0))
    monkeypatch.setattr(rounds, "busy_seconds", lambda: next(busy))
    diary: list[str] = []
    samples = interleave([Sleeper("a", 0.001, diary)], rounds=1)["a"]
    assert diary == ["a"] * 3  # warm, disturbed, kept
    assert samples.disturbed == 0


def test_on_a_machine_that_never_rests_the_step_is_kept_and_counted(monkeypatch: pytest.MonkeyPatch):
    busy = itertools.count()
    monkeypatch.setattr(rounds, "busy_seconds", lambda: float(next(busy)))
    samples = interleave([Sleeper("a", 0.001, [])], rounds=2)["a"]
    assert samples.disturbed == len(samples.wall_seconds) == 2
