"""Bracket: a cut and a lower bound on the bottleneck, which decisions bring together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from schedules.searching.clock import Clock

from .exact.capacity import SLACK
from .exact.decision import Decider, TooMuchWork
from .problem import Problem, Split

# A bottleneck counts as optimal if no other is smaller by more than this fraction.
RESOLUTION = 1e-9

# A gap below this fraction is not bisected: the next cut found usually closes it.
SMALL_GAP = 1e-4


@dataclass
class Bracket:
    """The best cut so far and the best lower bound so far: ``low <= optimum <= high`` at any time.

    Attributes:
        problem: what is cut.
        clock: when a search stops, by raising :class:`schedules.searching.clock.OutOfTime`.
        low: no cut has a smaller bottleneck, in seconds.
        split: the best cut, or None.
        high: its bottleneck; without a cut, an upper bound on any.
    """

    problem: Problem
    clock: Clock
    low: float
    split: Split | None = None
    high: float = math.inf

    @staticmethod
    def of(problem: Problem, clock: Clock) -> Bracket:
        """Return the bracket that is known without a search."""
        high = simple_upper_bound(problem) * (1 + RESOLUTION)
        return Bracket(problem, clock, simple_lower_bound(problem), high=high)

    def offer(self, split: Split) -> None:
        """Keep a cut if it is better than the best so far."""
        bottleneck = split.bottleneck(self.problem)
        if self.split is None or bottleneck < self.high:
            self.split, self.high = split, bottleneck

    def is_closed(self, resolution: float = RESOLUTION) -> bool:
        """Whether the gap is at most a fraction of the bottleneck."""
        return self.high - self.low <= resolution * self.high

    def close(self, decider: Decider, resolution: float = RESOLUTION, *, complete: bool = True) -> bool:
        """Decide until the gap is below ``resolution``. Return False if that takes too much work.

        The cut that was just found is often the best, so the first decision is just below it, which proves it. If
        there is a better cut, decisions just below a cut and in the middle of the gap take turns; after a proof that
        there is no cut, the gap is bisected.

        Args:
            decider: of some borders.
            resolution: a fraction of the bottleneck.
            complete: whether these are all the borders of cuts up to ``high``. If not, no bound follows.
        """
        low, just_below = self.low, True
        while self.high - low > resolution * self.high:
            gap = self.high - low
            proves = just_below or gap <= SMALL_GAP * self.high
            ask = self.high * (1 - resolution) if proves else self.high - gap / 2
            try:
                found = decider.split(ask)
            except TooMuchWork:
                return False
            if found is None:
                low = self.high if proves else ask
                self.low = low if complete else self.low
                just_below = False
                continue
            self.offer(found)
            just_below = not just_below
        return True


def simple_lower_bound(problem: Problem) -> float:
    """Return a lower bound in seconds: the largest node, or all work spread evenly over the devices."""
    each = zip(problem.types, problem.device_weights, strict=True)
    total = sum(len(device_type.devices) * float(weight) for device_type, weight in each)
    largest = np.min([device_type.seconds for device_type in problem.types], axis=0).max()
    return max(float(largest), math.fsum(problem.work) / total * (1 - SLACK))


def simple_upper_bound(problem: Problem) -> float:
    """Return an upper bound in seconds: all nodes on their slowest device, and all transfers."""
    slowest = [max(s for s in seconds if math.isfinite(s)) for seconds in
               zip(*(device_type.seconds.tolist() for device_type in problem.types), strict=True)]  # fmt: skip
    return math.fsum(slowest) + math.fsum(net.seconds for net in problem.nets)
