"""Cuts for schedules with several stages on each device: the sum of a device's stages is balanced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

import schedules

from ..cluster import Cluster
from .memory import MODES, RecomputeChoice
from .orders import device_types
from .stage_costs import ChainCosts, Floats
from .stage_plan import Recompute
from .wishes import Wishes

Borders = NDArray[np.int64]

MOST_CUTS = 20_000
_MOST_ORDERS = 24


@dataclass(frozen=True)
class ChunkedCut:
    """A cut into several stages a device.

    Attributes:
        starts: first layer of each stage.
        sites: device of each stage, by its position in the cluster.
        recompute: what all stages with a backward do.
        worst: largest load of any device, in seconds.
        bound: no cut has a smaller one.
        short_bytes: what a device lacks at the most; 0 where the cut fits.
    """

    starts: tuple[int, ...]
    sites: tuple[int, ...]
    recompute: Recompute
    worst: float
    bound: float
    short_bytes: int


class ChunkedProblem:
    """A profiled chain that is cut for a schedule whose devices have several stages each.

    Args:
        costs: of the layers.
        cluster: the devices; as many of them are used as the schedule has.
        schedule: says which stages share a device, and what is in flight when.
        recompute: what stages may do.
        wishes: of the user.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cluster: Cluster,
        schedule: schedules.Schedule,
        recompute: RecomputeChoice,
        wishes: Wishes,
    ) -> None:
        self._costs, self._cluster, self._recompute, self._wishes = costs, cluster, recompute, wishes
        self._rows = np.array(schedule.device_of)
        self._stages = len(self._rows)
        self._kept = _in_flight_together(schedule)
        self._allowed = np.isfinite(costs.border_seconds(cluster.link))
        self._limited = any(device.memory_bytes is not None for device in cluster.devices)
        self._needs: dict[tuple[int, int], tuple[int, int, int, int]] = {}

    def best(self) -> ChunkedCut | None:
        """The best cut found: the least shortage of memory, then the smallest load of any device, then the evenest.

        All cuts are tried where they are few; else a cut in proportion to the devices' speeds is improved by moving one
        or two borders at a time. None where no cut is possible.
        """
        found: ChunkedCut | None = None
        for mode in MODES[self._recompute]:
            for order in self._orders():
                cut = self._best_on(order, mode)
                if cut and (found is None or (cut.short_bytes, cut.worst) < (found.short_bytes, found.worst)):
                    found = cut
            if found and not found.short_bytes:
                break
        return replace(found, bound=self._bound(found)) if found else None

    def _bound(self, found: ChunkedCut) -> float:
        """What no cut can beat: the best of all cuts where all were tried, else all work shared out evenly."""
        orders = list(self._orders())
        all_tried = self._exhaustive(int(self._allowed[1:-1].sum())) and len(orders) < _MOST_ORDERS
        if all_tried and found.recompute == MODES[self._recompute][0]:
            return found.worst
        speeds = sorted((device.speed for device in self._cluster.devices), reverse=True)
        return min(found.worst, self._costs.total_seconds / sum(speeds[: len(orders[0])]))

    def _exhaustive(self, free: int) -> bool:
        return math.comb(free, self._stages - 1) <= (MOST_CUTS // 10 if self._limited else MOST_CUTS)

    def _orders(self) -> Iterator[tuple[int, ...]]:
        """Orders of the devices, the cluster's own first; those that only exchange devices that are alike left out."""
        rows = int(self._rows.max()) + 1
        of = {
            device: number
            for number, kind in enumerate(device_types(self._cluster))
            for device in kind.devices
        }
        seen: set[tuple[int, ...]] = set()
        for order in itertools.islice(itertools.permutations(range(len(self._cluster)), rows), 5000):
            key = tuple(of[device] for device in order)
            if key not in seen:
                seen.add(key)
                yield order
            if len(seen) == _MOST_ORDERS:
                return

    def _best_on(self, order: Sequence[int], mode: Recompute) -> ChunkedCut | None:
        free = np.flatnonzero(self._allowed[1:-1]) + 1
        inner = self._stages - 1
        if len(free) < inner or len(order) > len(self._cluster):
            return None
        exhaustive = self._exhaustive(len(free))
        if exhaustive:
            borders = np.array(list(itertools.combinations(free.tolist(), inner))).reshape(-1, inner)
        else:
            borders = self._proportional(free, order)[None, :]
        borders = self._wished(borders)
        if not len(borders):
            return None
        best, value = self._pick(borders, order, mode)
        while not exhaustive:
            near = self._wished(self._neighbours(best, free))
            if not len(near):
                break
            candidate, better = self._pick(near, order, mode)
            if not better < value:
                break
            best, value = candidate, better
        sites = tuple(order[row] for row in self._rows)
        return ChunkedCut((0, *map(int, best)), sites, mode, value[1], 0.0, int(value[0]))

    def _pick(
        self, borders: Borders, order: Sequence[int], mode: Recompute
    ) -> tuple[Borders, tuple[float, float, float]]:
        loads = self._loads(borders, order, mode)
        worst, squares = loads.max(axis=1), (loads**2).sum(axis=1)
        short = np.zeros(len(borders))
        if self._limited:
            short = np.array([self._short(row, order, mode) for row in borders.tolist()], dtype=float)
        at = int(np.lexsort((squares, worst, short))[0])
        return borders[at], (float(short[at]), float(worst[at]), float(squares[at]))

    def _loads(self, borders: Borders, order: Sequence[int], mode: Recompute) -> Floats:
        """Seconds of each device (columns) in each cut (rows)."""
        costs, rows = self._costs, self._rows
        count = len(borders)
        edges = np.hstack([np.zeros((count, 1), int), borders, np.full((count, 1), costs.layers)]).astype(
            np.int64
        )
        seconds = np.diff(costs.compute_sums[edges], axis=1)
        if mode != "never":
            backward = costs.backward_at[edges[:, 1:] - 1]
            seconds = seconds + np.where(backward, np.diff(costs.forward_sums[edges], axis=1), 0.0)
        names = [self._cluster.devices[site].name for site in order]
        loads = np.zeros((count, len(order)))
        for stage, row in enumerate(rows):
            loads[:, row] += seconds[:, stage] / self._cluster.devices[order[row]].speed
        for border, (one, other) in enumerate(itertools.pairwise(rows)):
            if one != other:
                link = self._cluster.link_between(names[one], names[other])
                crossing = costs.border_seconds(link)[borders[:, border]]
                loads[:, one] += crossing
                loads[:, other] += crossing
        return loads

    def _short(self, borders: Sequence[int], order: Sequence[int], mode: Recompute) -> int:
        """What a device lacks at the most."""
        edges = [0, *borders, self._costs.layers]
        needs = [self._need(a, b) for a, b in itertools.pairwise(edges)]
        worst = 0
        for row, site in enumerate(order):
            limit = self._cluster.devices[site].memory_bytes
            if limit is None:
                continue
            own = np.flatnonzero(self._rows == row)
            static = sum(needs[stage][0] for stage in own)
            transient = max(needs[stage][1] for stage in own)
            stash = np.array([needs[stage][2] for stage in own])
            if mode == "never":
                kept = int((self._kept[row] @ stash).max())
            else:
                whole = np.sort(stash)[::-1][: 1 if mode == "always" else 2].sum()
                kept = int((self._kept[row] @ np.array([needs[stage][3] for stage in own])).max() + whole)
            worst = max(worst, static + transient + kept - limit)
        return worst

    def _need(self, start: int, end: int) -> tuple[int, int, int, int]:
        """Static, transient, stash and boundary bytes of a stage."""
        if (start, end) not in self._needs:
            costs, layers = self._costs, slice(start, end)
            transient = int(costs.peak_bytes[layers].max() + costs.arriving_bytes[end - 1])
            self._needs[start, end] = (
                int(costs.static_bytes[layers].sum()),
                transient,
                costs.stash_bytes(layers),
                costs.boundary_bytes(start) if costs.needs_backward(layers) else 0,
            )
        return self._needs[start, end]

    def _proportional(self, free: Borders, order: Sequence[int]) -> Borders:
        speeds = np.array([self._cluster.devices[order[row]].speed for row in self._rows])
        targets = np.cumsum(speeds / speeds.sum())[:-1] * self._costs.total_seconds
        places = np.searchsorted(self._costs.compute_sums[free], targets)
        inner = len(targets)
        for index in range(inner):  # strictly increasing, and room left for those behind
            low = places[index - 1] + 1 if index else 0
            places[index] = min(max(places[index], low), len(free) - inner + index)
        return free[places]

    def _neighbours(self, borders: Borders, free: Borders) -> Borders:
        """Cuts with one border moved by up to 32 allowed places, or two by up to two."""
        at = np.searchsorted(free, borders)
        inner = len(at)
        found = [
            _moved(at, ((index, step * sign),))
            for index in range(inner)
            for step in (1, 2, 4, 8, 16, 32)
            for sign in (1, -1)
        ]
        pairs = itertools.combinations(range(inner), 2) if inner <= 32 else itertools.pairwise(range(inner))
        found += [
            _moved(at, ((one, first), (other, second)))
            for one, other in pairs
            for first in (-2, -1, 1, 2)
            for second in (-2, -1, 1, 2)
        ]
        table = np.array(found).reshape(-1, inner)
        inside = (table[:, 0] >= 0) & (table[:, -1] < len(free)) & (np.diff(table, axis=1) > 0).all(axis=1)
        return free[table[inside]]

    def _wished(self, borders: Borders) -> Borders:
        if not self._wishes.pins:
            return borders
        return borders[[self._wishes.allows(row) for row in borders.tolist()]]


def _moved(at: Borders, steps: Sequence[tuple[int, int]]) -> Borders:
    moved = at.copy()
    for index, step in steps:
        moved[index] += step
    return moved


def _in_flight_together(schedule: schedules.Schedule) -> list[NDArray[np.int64]]:
    """For each device the numbers of micro-batches that its stages (columns) have in flight at the same time.

    Only those (rows) that no other of them exceeds in all stages: they decide the peak, whatever a stash weighs.
    """
    table = []
    for row, actions in enumerate(schedule.actions):
        own = [stage for stage, device in enumerate(schedule.device_of) if device == row]
        count = dict.fromkeys(own, 0)
        seen: set[tuple[int, ...]] = set()
        for action in actions:
            for leaf in action.parts or (action,):
                if leaf.kind is schedules.Kind.F:
                    count[leaf.stage] += 1
            seen.add(tuple(count.values()))
            for leaf in action.parts or (action,):
                if leaf.kind in (schedules.Kind.B, schedules.Kind.W):
                    count[leaf.stage] -= 1
        top = [one for one in seen if not any(other != one and _exceeds(other, one) for other in seen)]
        table.append(np.array(top, dtype=np.int64))
    return table


def _exceeds(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
