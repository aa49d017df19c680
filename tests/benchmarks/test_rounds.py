"""Every contender steps in every round, and the order changes from round to round."""

import time

import pytest
from torch import Tensor

from benchmarks import quiet
from benchmarks.contender import InThisProcess
from benchmarks.quiet import Measurement
from benchmarks.rounds import Samples, interleave


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "busy_seconds", lambda: 0.0)


class Sleeper(InThisProcess):
    def __init__(self, name: str, seconds: float, diary: list[str]) -> None:
        self.name, self._seconds, self._diary = name, seconds, diary

    def step(self) -> None:
        self._diary.append(self.name)
        time.sleep(self._seconds)

    def gradients(self) -> dict[str, Tensor]:
        return {}


def test_each_round_warms_up_and_times_every_contender_and_turns_the_order():
    diary: list[str] = []
    interleave([Sleeper(name, 0, diary) for name in "abc"], rounds=3)
    assert "".join(diary) == "aaaaabbbbbccccc" + "bbbbbcccccaaaaa" + "cccccaaaaabbbbb"


def test_the_first_three_steps_of_a_turn_are_not_timed():
    class SlowStart(Sleeper):
        def step(self) -> None:
            self._seconds = 0.1 if len(self._diary) % 5 < 3 else 0.0
            super().step()

    samples = interleave([SlowStart("a", 0, [])], rounds=2)["a"]
    assert len(samples.wall_seconds) == 4
    assert max(samples.wall_seconds) < 0.1


def test_the_median_ignores_a_disturbed_round():
    samples = Samples([Measurement(None, seconds, seconds, 0.0) for seconds in (1.0, 9.0, 2.0)])
    assert samples.wall == samples.cpu == 2.0


def test_steps_that_never_found_quiet_are_counted():
    assert Samples([Measurement(None, 1.0, 1.0, 0.9), Measurement(None, 1.0, 1.0, 0.0)]).disturbed == 1
