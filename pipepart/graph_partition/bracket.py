"""Bracket: the best cut and a lower bound on the bottleneck; decisions close the gap between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from schedules.searching.clock import Clock

from .exact.capacity import SLACK
from .exact.decision import Decider, TooMuchWork
from .problem import Problem, Split

# A cut counts as optimal if no cut has a bottleneck that is smaller by more than this fraction.
RESOLUTION = 1e-9

# A gap below this fraction of the bottleneck is not bisected: the next cut usually closes it.
SMALL_GAP = 1e-4


@dataclass
class Bracket:
    """The best cut and the best lower bound so far. Always ``low <= optimum <= high``.

    Attributes:
        problem: the graph and the devices.
        clock: the time limit; raises :class:`schedules.searching.clock.OutOfTime`.
        low: lower bound on the bottleneck of all cuts, in seconds.
        split: the best cut so far, or None.
        high: bottleneck of ``split`` in seconds; without a cut, an upper bound on the bottleneck of any cut.
    """

    problem: Problem
    clock: Clock
    low: float
    split: Split | None = None
    high: float = math.inf

    @staticmethod
    def of(problem: Problem, clock: Clock) -> Bracket:
        """Return the bracket with the bounds that need no search."""
        high = simple_upper_bound(problem) * (1 + RESOLUTION)
        return Bracket(problem, clock, simple_lower_bound(problem), high=high)

    def offer(self, split: Split) -> None:
        """Replace ``split`` by a cut with a smaller bottleneck."""
        bottleneck = split.bottleneck(self.problem)
        if self.split is None or bottleneck < self.high:
            self.split, self.high = split, bottleneck

    def is_closed(self, resolution: float = RESOLUTION) -> bool:
        """Return True if the gap is at most ``resolution`` times the bottleneck."""
        return self.high - self.low <= resolution * self.high

    def close(self, decider: Decider, resolution: float = RESOLUTION, *, complete: bool = True) -> bool:
        """Run decisions until the gap is below ``resolution``. Return False if that takes too much work.

        The current cut is often optimal, so the first decision is just below its bottleneck. If that decision fails,
        the cut is proven optimal. If it returns a better cut, decisions just below the new bottleneck and decisions in
        the middle of the gap alternate. After a failed decision, the gap is bisected.

        Args:
            decider: answers decisions for a family of borders.
            resolution: fraction of the bottleneck.
            complete: whether the family has all borders of cuts up to ``high``. If not, ``low`` is not raised.
        """
        low, just_below = self.low, True
        while self.high - low > resolution * self.high:
            gap = self.high - low
            proves = just_below or gap <= SMALL_GAP * self.high
            ask = self.high * (1 - resolution) if proves else self.high - gap / 2
            try:
                split = decider.split(ask)
            except TooMuchWork:
                return False
            if split is None:
                low = self.high if proves else ask
                self.low = low if complete else self.low
                just_below = False
                continue
            self.offer(split)
            just_below = not just_below
        return True


def simple_lower_bound(problem: Problem) -> float:
    """Return the larger of two lower bounds in seconds: the longest node, and all work over all devices."""
    each = zip(problem.types, problem.device_weights, strict=True)
    total = sum(len(device_type.devices) * float(weight) for device_type, weight in each)
    largest = np.min([device_type.seconds for device_type in problem.types], axis=0).max()
    return max(float(largest), math.fsum(problem.work) / total * (1 - SLACK))


def simple_upper_bound(problem: Problem) -> float:
    """Return an upper bound in seconds: the sum of all nodes on their slowest device and of all transfers."""
    slowest = [max(s for s in seconds if math.isfinite(s)) for seconds in
               zip(*(device_type.seconds.tolist() for device_type in problem.types), strict=True)]  # fmt: skip
    return math.fsum(slowest) + math.fsum(net.seconds for net in problem.nets)
