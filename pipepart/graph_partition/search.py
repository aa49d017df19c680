"""Searches for the cut with the smallest bottleneck, and proves it optimal or returns a lower bound.

The algorithm
-------------
A cut into a pipeline is a chain of *downsets* (sets of nodes that hold every predecessor of their nodes; *ideals* in
the papers): {} = I0 < I1 < ... < Ik = V. Each downset is a *border*; the nodes between two borders are a stage. ::

      a ──► b ──► d ──► e          I1 = {a, c}      stage 0 = I1 \\ I0 = a c
      │           ▲                I2 = {a, b, c, d}  stage 1 = I2 \\ I1 = b d
      └───► c ────┘                I3 = V             stage 2 = I3 \\ I2 = e

1. **Upper bound** (``execution_order.py``). The best cut of the execution order into intervals, by dynamic
   programming. For a chain this is the best cut, and the search ends.
2. **Enumeration** (``downsets.py``): the downsets that can be borders of a cut with a smaller bottleneck than the best
   cut so far; ``capacity.py`` rules out most downsets.
3. **Decision** (``decision.py``): is there a cut with a bottleneck of at most T seconds? Border I' is reached with one
   more device than border I if I' \\ I is a stage of at most T seconds. There is a cut if V is reached. *Dominance*
   drops borders to which a node can be added at no cost.
4. **Closing the gap**. The first T is just below the upper bound. The answer is usually no, so one decision proves the
   cut optimal. Otherwise each answer lowers the upper bound or raises the lower bound.
5. **Too many downsets**. A beam search among the downsets with the smallest crossing improves the cut, which may leave
   few enough downsets for steps 2 to 4. Otherwise the cut is not proven, and its lower bound is the work.

Invariants:

- Nodes are numbered in a topological order: every prefix is a downset.
- ``low <= optimum <= bottleneck(split)`` always holds. The result is ``optimal`` only if both bounds agree to 1e-9.
- Every loop over nodes, borders or decisions checks the clock.
- Pruning at T only drops downsets that are not a border of any cut with a bottleneck of at most T. Thinned families
  of downsets yield cuts, but no lower bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from schedules.searching.clock import Clock, OutOfTime

from .capacity import SLACK, Capacity
from .decision import Decider, TooMuchWork
from .downsets import Downsets, blocks, downsets
from .execution_order import best_interval_split, even_split
from .problem import Problem, Split

# A cut counts as optimal if no cut has a bottleneck that is smaller by more than this fraction.
RESOLUTION = 1e-9

# The effort is counted in steps, so that equal calls give equal cuts.
MOST_SETS = 400_000  # maximum number of downsets in memory
MOST_BITS = 2**30  # maximum size of all downsets in memory: 128 MB
MOST_PAIRS = 200_000_000  # maximum number of pairs of borders to check
BEAM_SETS = 5_000  # maximum number of borders of a beam
BEAM_PAIRS = 40_000_000  # maximum number of pairs of borders that a beam checks
BEAM_GAP = 5e-4  # a beam stops at a gap of this fraction of the bottleneck


@dataclass(frozen=True)
class SearchResult:
    """The best cut or None, and a lower bound; ``optimal`` if the cut is proven optimal, or proven not to exist."""

    split: Split | None
    lower_bound: float
    optimal: bool


def search(problem: Problem, clock: Clock, most_sets: int = MOST_SETS) -> SearchResult:
    """Return the cut with the smallest bottleneck.

    Args:
        problem: the graph and the devices.
        clock: time limit. With a time limit, results may differ between runs.
        most_sets: maximum number of downsets in memory.
    """
    bounds = _Search(problem, clock, most_sets)
    try:
        proven = bounds.run()
    except OutOfTime:
        proven = False
    if bounds.split is None and not proven and (fallback := even_split(problem)):
        bounds.offer(fallback)
    proven = proven and problem.orders.complete
    low = bounds.high if proven else min(bounds.low, bounds.high)
    return SearchResult(bounds.split, low, optimal=proven)


class _Search:
    """The best cut and the lower bound so far.

    Attributes:
        low: lower bound on the bottleneck of all cuts, in seconds.
        split: the best cut so far, or None.
        high: bottleneck of ``split`` in seconds; without a cut, an upper bound on the bottleneck of any cut.
    """

    def __init__(self, problem: Problem, clock: Clock, most_sets: int) -> None:
        self._problem, self._clock = problem, clock
        self._most_sets = min(most_sets, max(1, MOST_BITS // len(problem)))
        self.low = _simple_lower_bound(problem)
        self.high = _simple_upper_bound(problem) * (1 + RESOLUTION)
        self.split: Split | None = None

    def offer(self, split: Split) -> None:
        """Replace ``split`` by a cut with a smaller bottleneck."""
        bottleneck = split.bottleneck(self._problem)
        if self.split is None or bottleneck < self.high:
            self.split, self.high = split, bottleneck

    def run(self) -> bool:
        """Search. Return True if ``split`` is proven optimal, or proven not to exist."""
        # If every downset is a prefix of the execution order, every cut is a cut of that order into intervals.
        is_one_order = all(high - start == 1 for start, high in blocks(self._problem))
        self._cut_execution_order()
        if is_one_order or (self.split and self._gap_is_at_most(RESOLUTION)):
            return True
        sets = self._borders(1 - RESOLUTION, self._most_sets)
        if sets is None and self.split:
            self._search_beam()
            sets = self._borders(1 - RESOLUTION, self._most_sets)
        if sets is not None and self._close(sets, MOST_PAIRS, RESOLUTION):
            return True
        return self.split is not None and self._gap_is_at_most(RESOLUTION)

    def _gap_is_at_most(self, fraction: float) -> bool:
        return self.high - self.low <= fraction * self.high

    def _cut_execution_order(self) -> None:
        """Find the best cut of the execution order into intervals."""
        # Start with a small limit: short intervals are quick to check and usually contain the optimum.
        most = self.high
        limit = min(1.25 * self.low, most)
        while not (split := best_interval_split(self._problem, self._clock, limit)) and limit < most:
            limit = min(2 * limit, most) if limit else most
        if split:
            self.offer(split)

    def _borders(self, fraction: float, most: int, *, thin: bool = False) -> Downsets | None:
        """Return the downsets that can be borders of a cut with a bottleneck of at most ``fraction * high``."""
        capacity = Capacity(self._problem, self.high * fraction)
        return downsets(self._problem, capacity, most, self._clock, thin=thin)

    def _search_beam(self) -> None:
        """Improve the cut by a search among borders that few tensors cross.

        For each amount of work, the beam stores only the downsets with the smallest crossing seconds.
        """
        low, sets = self.low, self._borders(1.0, BEAM_SETS, thin=True)
        if sets is None:
            return
        try:
            self._close(sets, BEAM_PAIRS, BEAM_GAP)
        finally:
            self.low = low  # the borders are not all borders, so their decisions prove nothing

    def _close(self, sets: Downsets, pairs: int, resolution: float) -> bool:
        """Run decisions until the gap is below ``resolution``. Return False if that takes too much work.

        The current cut is often optimal, so the first decision is just below its bottleneck. If that decision fails,
        the cut is proven optimal. Otherwise decisions in the middle of the gap and just below the bottleneck alternate.
        """
        decider = Decider(self._problem, sets, self._clock, pairs)
        just_below = True
        while not self._gap_is_at_most(resolution):
            limit = self.high * (1 - resolution) if just_below else (self.low + self.high) / 2
            try:
                split = decider.split(limit)
            except TooMuchWork:
                return False
            if split is not None:
                self.offer(split)
            else:
                self.low = self.high if just_below else limit
            just_below = not just_below
        return True


def _simple_lower_bound(problem: Problem) -> float:
    """Return the larger of two lower bounds in seconds: the longest node, and all work over all devices."""
    each = zip(problem.types, problem.device_weights, strict=True)
    total = sum(len(device_type.devices) * float(weight) for device_type, weight in each)
    largest = np.min([device_type.seconds for device_type in problem.types], axis=0).max()
    return max(float(largest), math.fsum(problem.work) / total * (1 - SLACK))


def _simple_upper_bound(problem: Problem) -> float:
    """Return an upper bound in seconds: the sum of all nodes on their slowest device and of all transfers."""
    slowest = [max(s for s in seconds if math.isfinite(s)) for seconds in
               zip(*(device_type.seconds.tolist() for device_type in problem.types), strict=True)]  # fmt: skip
    return math.fsum(slowest) + math.fsum(net.seconds for net in problem.nets)
