"""Cuts for schedules with several stages, or copies of stages, on each device: the sum of these is balanced."""

from __future__ import annotations

import itertools
import math

import numpy as np

from ...cluster import Cluster
from ..constraints import Constraints
from ..costs.cut_costs import Borders, CutCosts, CutTable
from ..costs.layer_ranges import ChainCosts
from .chain_dp import ChainCut
from .device_orders import distinct_orders
from .local_search import climb, neighbours

MOST_CUTS = 3_000
_MOST_ORDERS = 24
_CLIMBED = 4  # of these orders, if there are too many cuts to try all
_STEPS = tuple(sign * step for step in (1, 2, 4, 8, 16, 32) for sign in (1, -1))
_PAIR_STEPS = (-2, -1, 1, 2)

# Deficit of memory, largest load and sum of the squares of the loads: smaller is better.
_Value = tuple[float, float, float]
_Order = tuple[int, ...]
_Found = tuple[_Value, Borders, _Order]


class ChunkedProblem:
    """A profiled chain to cut for a schedule whose devices have several stages each, or copies of several.

    Args:
        costs: of the layers.
        cluster: the devices. As many of them are used as the schedule has.
        cuts: the costs of cuts, with the schedule row of each stage and the recompute modes that a device may use.
        constraints: of the user.
    """

    def __init__(self, costs: ChainCosts, cluster: Cluster, cuts: CutCosts, constraints: Constraints) -> None:
        self._costs, self._cluster, self._chunks, self._constraints = costs, cluster, cuts, constraints
        self._rows, self._inner = cuts.rows[: cuts.stages], cuts.stages - 1

    def best(self) -> ChainCut | None:
        """Return the best cut found: least deficit of memory, then smallest bottleneck, then evenest loads.

        Exact if there are at most 3,000 cuts and 24 orders of the devices: all are tried. Else local search from cuts
        in proportion to the speeds of the devices, and the bound is that of perfectly even loads. None if no cut is
        possible.
        """
        allowed = self._costs.allowed_borders
        devices = int(self._rows.max()) + 1
        orders = list(itertools.islice(distinct_orders(self._cluster, devices), _MOST_ORDERS + 1))
        if len(allowed) < self._inner:
            return None
        exhaustive = math.comb(len(allowed), self._inner) <= MOST_CUTS
        if exhaustive:
            borders = np.array(list(itertools.combinations(allowed.tolist(), self._inner)), dtype=np.int64)
            borders = self._constraints.allowed(borders.reshape(-1, self._inner))
            if not len(borders):
                return None
            table = self._chunks.of(borders)
            found = [(*_pick(table, order), order) for order in orders[:_MOST_ORDERS]]
            # Memory is an upper bound where stages may relay what they do not use: then more cuts may fit.
            if len(orders) <= _MOST_ORDERS and not (self._costs.skips and self._costs.skips.may_relay):
                bound = min(_least_load(table, order) for order in orders)
                return self._cut(min(found, key=lambda one: one[0]), bound, exhaustive=True)
        else:
            starts = [one for order in orders[:_MOST_ORDERS] if (one := self._start(order))]
            starts.sort(key=lambda one: one[0])
            found = [climb(start, self._better) for start in starts[:_CLIMBED]]
            if not found:
                return None
        speeds = sorted((device.speed for device in self._cluster.devices), reverse=True)
        even = self._costs.total_seconds / sum(speeds[:devices])
        return self._cut(min(found, key=lambda one: one[0]), even, exhaustive=False)

    def nearest(self) -> ChainCut | None:
        """The cut found whose largest deficit of memory is smallest, None where no cut is possible at all."""
        return self.best()

    def _cut(self, found: _Found, bound: float, *, exhaustive: bool) -> ChainCut:
        (deficit, bottleneck, _), borders, order = found
        device_indices = tuple(order[row] for row in self._rows)
        return ChainCut(
            (0, *map(int, borders)), device_indices, min(bound, bottleneck), int(deficit), exhaustive
        )

    def _start(self, order: _Order) -> _Found | None:
        """The cut in proportion to the speeds of the devices; None if the constraints forbid it."""
        cut = self._constraints.allowed(self._proportional(order)[None, :])
        return (*_pick(self._chunks.of(cut), order), order) if len(cut) else None

    def _better(self, here: _Found) -> _Found | None:
        value, borders, order = here
        near = self._constraints.allowed(
            neighbours(borders, self._costs.allowed_borders, _STEPS, _PAIR_STEPS)
        )
        if not len(near):
            return None
        found = _pick(self._chunks.of(near), order)
        return (*found, order) if found[0] < value else None

    def _proportional(self, order: _Order) -> Borders:
        allowed = self._costs.allowed_borders
        speeds = np.array([self._cluster.devices[order[row]].speed for row in self._rows])
        targets = np.cumsum(speeds / speeds.sum())[:-1] * self._costs.total_seconds
        places = np.searchsorted(self._costs.compute_sums[allowed], targets)
        inner = len(targets)
        for index in range(inner):  # strictly increasing, and room left for those behind
            low = places[index - 1] + 1 if index else 0
            places[index] = min(max(places[index], low), len(allowed) - inner + index)
        return allowed[places]


def _pick(table: CutTable, order: _Order) -> tuple[_Value, Borders]:
    """The best cut of a table with the devices in this order."""
    loads = table.loads(order, table.choices(order))
    short = np.maximum(table.deficits(order).max(axis=1), 0)
    worst, squares = loads.max(axis=1), (loads**2).sum(axis=1)
    at = int(np.lexsort((squares, worst, short))[0])
    return (float(short[at]), float(worst[at]), float(squares[at])), table.borders[at]


def _least_load(table: CutTable, order: _Order) -> float:
    """What no cut of the table that fits can beat, whatever any of its stages does."""
    fitting = (table.deficits(order) <= 0).all(axis=1)
    loads = table.loads(order, np.zeros(table.deficits(order).shape, dtype=np.int64)).max(axis=1)
    return float(loads[fitting].min(initial=math.inf))
