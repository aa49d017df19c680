"""Closes the gap between a cut and a bound by asking for better cuts."""

from __future__ import annotations

from dataclasses import dataclass

from ..budget import Clock
from ..exact.decision import Decider, TooMuchWork
from ..heuristics.moves import bettered
from ..problem import Problem, Split

# A bottleneck is taken for the smallest when none is smaller by more than this fraction of it.
RESOLUTION = 1e-9

# A gap of this fraction is not halved any more: what is found next mostly closes it.
LITTLE = 1e-4

# The first step down, where the cut is likely to be good.
STEP = 2e-3


@dataclass
class Closing:
    """A cut, None as long as there is none, its bottleneck, and a bound; asking a decider moves them together.

    Attributes:
        problem: what is cut.
        split: the best cut so far.
        high: its bottleneck; without a cut, seconds that no cut exceeds.
        low: seconds that no cut of the decider's borders has less than.
        step: the first step down from a cut that was not the last, as a fraction.
    """

    problem: Problem
    split: Split | None
    high: float
    low: float
    step: float = STEP

    def close(self, decider: Decider, clock: Clock, resolution: float = RESOLUTION) -> bool:
        """Asks until ``low`` comes within a fraction ``resolution`` of ``high``; whether the work granted was enough.

        Mostly nothing is left below a cut that was just found, so that is the first question. From a cut that does
        have a better one the steps down grow, and what is between a step up and one down is halved.
        """
        step, fresh = self.step, True
        while self.high - self.low > resolution * self.high:
            if clock.over:
                return False
            gap = self.high - self.low
            if fresh or gap <= LITTLE * self.high:
                ask = self.high * (1 - resolution)
            else:
                ask = self.high - min(gap / 2, step * self.high)
            try:
                found = decider.split(ask)
            except TooMuchWork:
                return False
            if found is None:
                self.low = self.high if ask >= self.high * (1 - resolution) else ask
                fresh = False
                continue
            self.split = bettered(self.problem, found)
            self.high = self.split.bottleneck(self.problem)
            step, fresh = (step, True) if not fresh else (4 * step, False)
        return True
