"""Cuts for schedules with several stages on each device: the sum of a device's stages is balanced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...cluster import Cluster
from ..constraints import Constraints
from ..costs.chunk_costs import Borders, ChunkCosts, CutTable
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import StashCounts
from ..stage_plan import Recompute
from .device_orders import distinct_orders

MOST_CUTS = 20_000
_MOST_ORDERS = 24
_CLIMBED = 4  # of these orders, where not all cuts can be tried

# Shortage of memory, largest load and sum of the squares of the loads: smaller is better.
_Value = tuple[float, float, float]
_Order = tuple[int, ...]


@dataclass(frozen=True)
class ChunkedCut:
    """A cut into several stages a device.

    Attributes:
        first_layers: first layer of each stage.
        device_indices: device of each stage, by its position in the cluster.
        bound: no cut that fits has a smaller largest load of any device.
        deficit_bytes: what a device lacks at the most; 0 where the cut fits.
        all_tried: whether no cut was left out, so that none lacks less.
    """

    first_layers: tuple[int, ...]
    device_indices: tuple[int, ...]
    bound: float
    deficit_bytes: int
    all_tried: bool


class ChunkedProblem:
    """A profiled chain that is cut for a schedule whose devices have several stages each.

    Args:
        costs: of the layers.
        cluster: the devices; as many of them are used as the schedule has.
        device_of: the row of the schedule that each stage is in.
        kept: what stages may do, the quickest first, and what the schedule's devices keep at once if all of them do;
            the stages of one device do the same.
        constraints: of the user.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cluster: Cluster,
        device_of: Sequence[int],
        kept: Mapping[Recompute, StashCounts],
        constraints: Constraints,
    ) -> None:
        self._costs, self._cluster, self._constraints = costs, cluster, constraints
        self._chunks = ChunkCosts(costs, cluster, device_of, kept)
        self._rows, self._inner = self._chunks.rows, len(device_of) - 1
        allowed = np.isfinite(costs.border_seconds(cluster.link))
        self._allowed_borders = np.flatnonzero(allowed[1:-1]) + 1

    def best(self) -> ChunkedCut | None:
        """The best cut found: the least shortage of memory, then the smallest load of any device, then the evenest.

        All cuts are tried where they are few; else a cut in proportion to the devices' speeds is improved by moving one
        or two borders at a time. None where no cut is possible.
        """
        orders = list(
            itertools.islice(distinct_orders(self._cluster, int(self._rows.max()) + 1), _MOST_ORDERS + 1)
        )
        if len(self._allowed_borders) < self._inner:
            return None
        if math.comb(len(self._allowed_borders), self._inner) <= MOST_CUTS:
            borders = np.array(list(itertools.combinations(self._allowed_borders.tolist(), self._inner)))
            borders = self._allowed(borders.reshape(-1, self._inner))
            if not len(borders):
                return None
            table = self._chunks.of(borders)
            found = [(*_pick(table, order), order) for order in orders[:_MOST_ORDERS]]
            if len(orders) <= _MOST_ORDERS:
                value, best, order = min(found, key=lambda entry: entry[0])
                bound = min(_least_load(table, order) for order in orders)
                return self._cut(best, order, value, min(bound, value[1]), all_tried=True)
        else:
            starts = [one for order in orders[:_MOST_ORDERS] if (one := self._start(order))]
            if not starts:
                return None
            found = [self._climbed(*start) for start in sorted(starts, key=lambda entry: entry[0])[:_CLIMBED]]
        value, best, order = min(found, key=lambda entry: entry[0])
        speeds = sorted((device.speed for device in self._cluster.devices), reverse=True)
        shared = self._costs.total_seconds / sum(speeds[: len(order)])
        return self._cut(best, order, value, min(shared, value[1]), all_tried=False)

    def nearest(self) -> ChunkedCut | None:
        """The cut found whose largest shortage of memory is smallest, None where no cut is possible at all."""
        return self.best()

    def modes(self, first_layers: Sequence[int], device_indices: Sequence[int]) -> list[Recompute]:
        """What each stage does: the first of what it may do with which its device fits, else what needs least."""
        order = [
            device_indices[int(np.argmax(self._rows == row))] for row in range(int(self._rows.max()) + 1)
        ]
        chosen = self._chunks.of(np.array([first_layers[1:]], dtype=np.int64)).choices(order)[0]
        ends = [*first_layers[1:], self._costs.layers]
        return [
            self._chunks.modes[chosen[row]] if self._costs.needs_backward(slice(start, end)) else "never"
            for row, start, end in zip(self._rows, first_layers, ends, strict=True)
        ]

    def _cut(
        self, borders: Borders, order: _Order, value: _Value, bound: float, *, all_tried: bool
    ) -> ChunkedCut:
        device_indices = tuple(order[row] for row in self._rows)
        return ChunkedCut((0, *map(int, borders)), device_indices, bound, int(value[0]), all_tried)

    def _start(self, order: _Order) -> tuple[_Value, Borders, _Order] | None:
        """The cut in proportion to the speeds of the devices; None where constraints forbid it."""
        cut = self._allowed(self._proportional(order)[None, :])
        return (*_pick(self._chunks.of(cut), order), order) if len(cut) else None

    def _climbed(self, value: _Value, best: Borders, order: _Order) -> tuple[_Value, Borders, _Order]:
        """The best that is found by steps from a cut to a better one beside it."""
        while len(near := self._allowed(self._neighbours(best))):
            better, candidate = _pick(self._chunks.of(near), order)
            if not better < value:
                break
            value, best = better, candidate
        return value, best, order

    def _proportional(self, order: _Order) -> Borders:
        free = self._allowed_borders
        speeds = np.array([self._cluster.devices[order[row]].speed for row in self._rows])
        targets = np.cumsum(speeds / speeds.sum())[:-1] * self._costs.total_seconds
        places = np.searchsorted(self._costs.compute_sums[free], targets)
        inner = len(targets)
        for index in range(inner):  # strictly increasing, and room left for those behind
            low = places[index - 1] + 1 if index else 0
            places[index] = min(max(places[index], low), len(free) - inner + index)
        return free[places]

    def _neighbours(self, borders: Borders) -> Borders:
        """Cuts with one border moved by up to 32 allowed places, or two by up to two."""
        free = self._allowed_borders
        table = np.searchsorted(free, borders) + _moves(self._inner)
        inside = (table[:, 0] >= 0) & (table[:, -1] < len(free)) & (np.diff(table, axis=1) > 0).all(axis=1)
        return free[table[inside]]

    def _allowed(self, borders: Borders) -> Borders:
        if not self._constraints.pins:
            return borders
        return borders[[self._constraints.allows(row) for row in borders.tolist()]]


@lru_cache(maxsize=8)
def _moves(inner: int) -> Borders:
    """Steps from a cut to those beside it, one number for each of so many borders."""
    one = np.eye(inner, dtype=np.int64)
    far = [step * sign for step in (1, 2, 4, 8, 16, 32) for sign in (1, -1)]
    near = list(itertools.product((-2, -1, 1, 2), repeat=2))
    pairs = itertools.combinations(range(inner), 2) if inner <= 32 else itertools.pairwise(range(inner))
    single = [step * row for row in one for step in far]
    double = [a * one[first] + b * one[second] for first, second in pairs for a, b in near]
    return np.array([*single, *double]).reshape(-1, inner)


def _pick(table: CutTable, order: _Order) -> tuple[_Value, Borders]:
    """The best cut of a table with the devices in this order."""
    loads = table.loads(order, table.choices(order))
    short = np.maximum(table.lacks(order).max(axis=1), 0)
    worst, squares = loads.max(axis=1), (loads**2).sum(axis=1)
    at = int(np.lexsort((squares, worst, short))[0])
    return (float(short[at]), float(worst[at]), float(squares[at])), table.borders[at]


def _least_load(table: CutTable, order: _Order) -> float:
    """What no cut of the table that fits can beat, whatever any of its stages does."""
    fitting = (table.lacks(order) <= 0).all(axis=1)
    loads = table.loads(order, np.zeros(table.lacks(order).shape, dtype=np.int64)).max(axis=1)
    return float(loads[fitting].min(initial=math.inf))
