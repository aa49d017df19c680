"""Lower bound on the bottleneck of any cut, from minimum cuts: the least that a stage pays for its two borders.

It serves graphs with too many downsets to search; the published reference graphs are all proven without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .border_cuts import BorderCuts
from .exact.capacity import SLACK, Capacity
from .problem import Problem

# Number of ranges of the work before a border; no more than nodes.
RANGES = 64

# The bound is bisected to this fraction.
PRECISION = 1e-3


class CrossingBound:
    """Decides whether the devices can reach the end within a bottleneck, if each border is crossed by little.

    The work before a border is in one of ``RANGES`` equal ranges. Take a stage between a border in range a and one in
    range b. Two kinds of tensors cost it their seconds for certain. ::

          border in a      border in b
              │    stage       │        used early: crosses the first border, and has a use that is before every
        u ────┼──► w           │          border in b, so in the stage
              │       u ───────┼──► w   made late: crosses the second border, and its maker is behind every
              │                │          border in a, so in the stage

    None is of both kinds, so the least of each is found apart, by minimum cuts (:meth:`BorderCuts.least`). A tensor
    that may pass over the stage is of neither kind. The same holds for groups of stages between any two borders, with
    the capacity of as many devices: the longer a group, the fewer tensors can pass over it.

    A minimum cut is found when it is asked for; at most ``RANGES``² are.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        cuts = BorderCuts(problem)
        self._ranges = ranges = min(RANGES, len(problem))
        self._edges = edges = [cuts.total * place / ranges for place in range(ranges + 1)]

        def used_early(place: int, last: int) -> float:
            limit = edges[last] if last < ranges else math.inf
            return cuts.least(edges[place], edges[place + 1], used_before=limit)

        def made_late(place: int, length: int) -> float:
            limit = edges[place + 1 - length] if length <= place else -math.inf
            return cuts.least(edges[place], edges[place + 1], made_after=limit)

        # At each place, by the number of ranges to the other border; longer stages pay at least as much.
        self._used_early = [
            _Growing(lambda n, at=place: used_early(at, at + n), ranges - place) for place in range(ranges)
        ]
        self._made_late = [
            _Growing(lambda n, at=place: made_late(at, n), place + 1) for place in range(ranges)
        ]

    def bound(self, low: float, high: float) -> float:
        """Return the best lower bound between ``low`` (already a bound) and ``high``, in seconds."""
        devices = self._problem.device_count
        # A device that does not pay for tensors may be anywhere in a group.
        pays = all(device_type.pays for device_type in self._problem.types)
        group = 1
        while group < devices:
            top = high
            while top - low > PRECISION * top:
                # Just above what is proven first: of most groups no more is.
                middle = low * (1 + PRECISION) if top == high else (low + top) / 2
                if self._possible(middle, group):
                    top = middle
                else:
                    low, top = middle, min(top, high * (1 - 1e-12))
            if not pays:
                break
            group *= 2
        return low

    def _possible(self, seconds: float, group: int) -> bool:
        """Return True if groups of that many stages may lead from the start to the end."""
        capacity = Capacity(self._problem, seconds)
        each = sorted(
            (
                float(size)
                for size, kind in zip(capacity.device_capacity, self._problem.types, strict=True)
                for _ in kind.devices
            ),
            reverse=True,
        )
        limit = sum(each[:group]) * (1 + SLACK)
        # Range -1 is the empty border and the one after the last the full border: nothing crosses these.
        reached, news = {-1}, [-1]
        for _ in range(-(-capacity.devices // group)):
            ends: dict[int, None] = {}
            for first in news:
                for last in range(first + 1, self._ranges + 1):
                    if (
                        last not in reached
                        and last not in ends
                        and self._is_stage(first, last, limit, capacity)
                    ):
                        ends[last] = None
            if self._ranges in ends:
                return True
            news = [*ends]
            reached.update(news)
        return False

    def _is_stage(self, first: int, last: int, limit: float, capacity: Capacity) -> bool:
        """Return True if stages between borders of two ranges may take no more than the limit."""
        work = self._edges[last] - self._edges[first + 1]
        if work > limit:
            return False
        if work <= capacity.free_capacity * (1 + SLACK):
            return True
        kinds = [self._used_early[first]] if first >= 0 else []
        kinds += [self._made_late[last]] if last < self._ranges else []
        weight, left, length = capacity.transfer_weight, limit - work, last - first
        if weight * sum(kind.most(length) for kind in kinds) <= left:
            return True
        # The kinds that are known too little are found one after the other, as the first may be enough.
        for kind in kinds:
            if weight * sum(kind.least(length) for kind in kinds) > left:
                return False
            kind.find(length)
        return weight * sum(kind.least(length) for kind in kinds) <= left


class _Growing:
    """The values of a function that grows with a whole number, as far as they have been asked for."""

    def __init__(self, function: Callable[[int], float], largest: int) -> None:
        self._function, self._largest = function, largest
        self._known: dict[int, float] = {0: 0.0}

    def find(self, number: int) -> None:
        """Find the value for a number."""
        if number not in self._known:
            self._known[number] = self._function(number)

    def least(self, number: int) -> float:
        """Return the value, or a lower bound where it was not found."""
        return max(value for known, value in self._known.items() if known <= number)

    def most(self, number: int) -> float:
        """Return the value, or an upper bound where it was not found."""
        self.find(self._largest)
        return min(value for known, value in self._known.items() if known >= number)
