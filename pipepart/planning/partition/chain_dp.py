"""The best cut of a chain of layers into stages: smallest bottleneck, within each device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster, Link
from ..costs.layer_ranges import ChainCosts, Floats, Row
from ..costs.stage_memory import StashCounts
from ..stage_plan import Recompute
from .device_orders import Ints, Orders, all_orders, devices_of, given_order

_SAME = 1e-12
# Of cuts with equal bottlenecks the one whose stages take the least time together, and of those the more even one.
_EVENNESS = 1e-3

Places = Callable[[int], tuple[range, range]]


@dataclass(frozen=True)
class ChainCut:
    """A cut and the best that is known of cuts.

    Attributes:
        first_layers: first layer of each stage.
        device_indices: device of each, by its position in the cluster.
        bound: no order of the devices and no cut that fits has a smaller largest load of any stage; 0 where that is
            not known.
        deficit_bytes: what a stage lacks at the most; 0 where the cut fits.
        all_tried: whether no order of the devices was left out, so that none lacks less.
    """

    first_layers: tuple[int, ...]
    device_indices: tuple[int, ...]
    bound: float
    deficit_bytes: int
    all_tried: bool


class ChainProblem:
    """A profiled chain, the devices, and what is asked of a cut into ``stages`` stages.

    Args:
        costs: of the layers.
        cluster: the devices; any order of them may be used, and some may be left out.
        stages: number of stages.
        kept: what stages may do, the quickest first, and what they keep at once if all of them do.
        places: for each number of stages from a stage to the end, the layers that it may begin with and the ends that
            it may have; None for any.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cluster: Cluster,
        stages: int,
        kept: Mapping[Recompute, StashCounts],
        places: Places | None = None,
    ) -> None:
        self._costs, self._cluster, self._stages, self._kept = costs, cluster, stages, kept
        self._modes = tuple(kept)
        self._places = places

    def best(self) -> ChainCut | None:
        """The cut with the smallest bottleneck, None where none fits.

        Exact, by dynamic programming over suffixes: the best way to lay the layers from ``a`` on over a set of devices
        is a first stage ``[a, b)`` on one of them and the best way from ``b`` on over the others. A suffix is the right
        state because what a stage keeps for its backwards depends on the number of stages from it to the end (as in
        Alpa, Zheng et al. 2022, section 5.2). Of devices that are alike only the number counts. Only ends that
        a guess of the bottleneck leaves open are looked at; a cut no worse than the guess is the best there is.
        """
        orders = all_orders(self._cluster, self._stages)
        found = self._least(orders, self._load, self._reach_seconds(orders), self._first_guess(orders))
        if found is None:
            return None
        if len(orders.types) > 1 and self._stages == len(self._cluster):
            own = given_order(self._cluster, range(self._stages))
            as_given = self._least(own, self._load, self._reach_seconds(own), found * (1 + _SAME))
            if as_given is not None and as_given <= found * (1 + _SAME):
                orders = own  # the user's own order is as good as any
        complete = len(orders.types) == 1 or all_orders(self._cluster, self._stages).complete
        return self._evenest(orders, found, complete)

    def nearest(self) -> ChainCut | None:
        """The cut whose largest shortage of memory is smallest, None where no cut is possible at all."""
        orders = all_orders(self._cluster, self._stages)
        largest = max(kind.memory for kind in orders.types)

        def reach(short: float) -> list[int]:
            return [self._costs.reach_bytes(a, short + largest) for a in range(self._costs.layers)]

        guess = (
            math.inf if math.isinf(largest) else self._costs.total_static_bytes / self._stages * 1.2 - largest
        )
        found = self._least(orders, self._shortage, reach, guess)
        if found is None:
            return None
        first_layers, device_indices = self._traced(orders, self._shortage, reach(found))
        return ChainCut(first_layers, device_indices, 0.0, max(int(found), 0), orders.complete)

    def modes(self, first_layers: Sequence[int], device_indices: Sequence[int]) -> list[Recompute]:
        """What each stage does: the first of what it may do that fits its device, else what needs least."""
        chosen: list[Recompute] = []
        ends = [*first_layers[1:], self._costs.layers]
        for index, (start, end, site) in enumerate(zip(first_layers, ends, device_indices, strict=True)):
            layers = slice(start, end)
            limit = self._cluster.devices[site].memory_bytes or math.inf
            fixed = (
                self._costs.held_bytes(layers)
                + self._costs.peak_bytes[layers].max()
                + self._costs.arriving_bytes[end - 1]
            )
            sizes = self._costs.kept_sizes(layers)
            if not self._costs.needs_backward(layers):
                chosen.append("never")
                continue
            older = self._costs.version_bytes(layers)
            needs = [
                fixed + kept.older[index] * older + kept.bytes_of(index, sizes)
                for kept in self._kept.values()
            ]
            fits = [need <= limit for need in needs]
            chosen.append(self._modes[fits.index(True) if any(fits) else needs.index(min(needs))])
        return chosen

    def _first_guess(self, orders: Orders) -> float:
        speeds = sorted((kind.speed for kind in orders.types for _ in kind.devices), reverse=True)
        even = self._costs.total_seconds / sum(speeds[: self._stages])
        return 1.1 * max(even, float(self._costs.seconds.max()) / speeds[0])

    def _reach_seconds(self, orders: Orders) -> Callable[[float], list[int]]:
        fastest = max(kind.speed for kind in orders.types)

        def reach(limit: float) -> list[int]:
            return [self._costs.reach_seconds(a, limit * fastest) for a in range(self._costs.layers)]

        return reach

    def _least(
        self, orders: Orders, value: _Value, reach: Callable[[float], list[int]], guess: float
    ) -> float | None:
        """The smallest possible largest value of any stage."""
        step = max(abs(guess), 1e-9)
        while True:
            ends = reach(guess)
            found = self._sweep(orders, value, ends, np.maximum)[0][orders.finals, 0].min()
            if found <= guess or (min(ends) == self._costs.layers and not math.isfinite(found)):
                return float(found) if math.isfinite(found) else None
            # A value that was found bounds the best one; where nothing was, look further.
            guess = float(found) if math.isfinite(found) else guess + step
            step *= 2

    def _evenest(self, orders: Orders, limit: float, complete: bool) -> ChainCut:
        """Of the cuts whose bottleneck is ``limit``, the one whose stages take the least time together."""

        def value(row: Row, view: _View) -> Floats:
            load = self._load(row, view)
            penalty = load * (1 + _EVENNESS * load / limit) if limit else load
            return np.where(load <= limit * (1 + _SAME), penalty, np.inf)

        first_layers, device_indices = self._traced(orders, value, self._reach_seconds(orders)(limit), np.add)
        return ChainCut(first_layers, device_indices, limit if complete else 0.0, 0, complete)

    def _traced(
        self, orders: Orders, value: _Value, reach: Sequence[int], joined: _Joined = np.maximum
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first layers and the devices of the stages of the cut with the least value."""
        best, choice, end_of = self._sweep(orders, value, reach, joined)
        state, start = int(orders.finals[best[orders.finals, 0].argmin()]), 0
        first_layers, types = [], []
        for _ in range(self._stages):
            edge = int(choice[state, start])
            first_layers.append(start)
            types.append(int(orders.type[edge]))
            state, start = int(orders.source[edge]), int(end_of[state, start])
        assert start == self._costs.layers
        return tuple(first_layers), devices_of(orders, types)

    def _sweep(
        self, orders: Orders, value: _Value, reach: Sequence[int], joined: _Joined
    ) -> tuple[Floats, NDArray[np.int32], NDArray[np.int32]]:
        """For each state and first layer the best value, the edge that gives it, and where its stage ends."""
        layers = self._costs.layers
        view = _View(self._costs, self._cluster, orders)
        best = np.full((orders.states, layers + 1), np.inf)
        best[orders.starts, layers] = -np.inf if joined is np.maximum else 0.0
        choice = np.zeros((orders.states, layers + 1), dtype=np.int32)
        end_of = np.zeros((orders.states, layers + 1), dtype=np.int32)
        targets, firsts = np.unique(orders.target, return_index=True)
        segment = np.repeat(np.arange(len(targets)), np.diff(np.r_[firsts, len(orders.target)]))
        edges = np.arange(len(orders.target))
        for row in self._costs.rows(reach):
            start = row.start
            values = value(row, view)
            if self._places:
                values = np.where(self._placed(orders, row), values, np.inf)
            both = joined(values, best[orders.source, start + 1 : start + 1 + values.shape[1]])
            end = both.argmin(axis=1)
            of_edge = both[edges, end]
            least = np.minimum.reduceat(of_edge, firsts)
            good = np.flatnonzero(of_edge <= least[segment])[::-1]
            best[targets, start] = least
            choice[orders.target[good], start] = good
            end_of[orders.target[good], start] = start + 1 + end[good]
        return best, choice, end_of

    def _placed(self, orders: Orders, row: Row) -> np.ndarray:
        assert self._places
        ends = np.arange(row.start + 1, row.start + 1 + len(row.seconds))
        allowed = np.zeros((self._stages + 1, len(ends)), dtype=bool)
        for left in range(1, self._stages + 1):
            begin, end = self._places(left)
            if row.start in begin:
                allowed[left] = (ends >= end.start) & (ends < end.stop)
        return allowed[orders.left]

    def _load(self, row: Row, view: _View) -> Floats:
        """A stage's seconds; infinite where its memory does not fit."""
        seconds = row.seconds * view.pace + view.transfer(row)
        if view.unlimited and self._modes[0] == "never":
            return seconds
        found = np.full(seconds.shape, np.inf)
        for mode in self._modes:
            fits = self._need(row, view, mode) <= view.memory
            taken = seconds if mode == "never" else seconds + row.again_seconds * view.pace
            found = np.minimum(found, np.where(fits, taken, np.inf))
            if fits.all():
                break
        return found

    def _shortage(self, row: Row, view: _View) -> Floats:
        """Bytes that a stage lacks that does what needs least; negative where it fits."""
        lack = self._need(row, view, self._modes[-1]) - view.memory
        return np.where(np.isfinite(view.transfer(row)), lack, np.inf)

    def _need(self, row: Row, view: _View, mode: Recompute) -> Floats:
        kept, sizes = self._kept[mode], [row.stash_bytes, row.boundary_bytes]
        if kept.weighed > len(sizes):
            sizes.append(self._costs.waiting_bytes_of(row))
        need = row.fixed_bytes + kept.bytes_by_left(sizes)[view.left]
        return need + np.outer(kept.older_by_left[view.left], row.version_bytes) if any(kept.older) else need


class _View:
    """The edges of a walk as columns, to be laid over the ends of a row."""

    def __init__(self, costs: ChainCosts, cluster: Cluster, orders: Orders) -> None:
        types = orders.types
        self.pace = 1 / np.array([kind.speed for kind in types])[orders.type][:, None]
        self.memory = np.array([kind.memory for kind in types])[orders.type][:, None]
        self.unlimited = bool(np.isinf(self.memory).all())
        self.left = orders.left
        self._links, self._before, self._behind = _links(costs, cluster, orders)

    def transfer(self, row: Row) -> Floats:
        """Seconds of a stage's borders."""
        ends = slice(row.start + 1, row.start + 1 + len(row.seconds))
        if len(self._links) == 1:
            return (self._links[0, row.start] + self._links[0, ends])[None, :]
        return self._links[self._before, row.start][:, None] + self._links[self._behind, ends]


_Value = Callable[[Row, _View], Floats]
_Joined = Callable[[Floats, Floats], Floats]


def _links(costs: ChainCosts, cluster: Cluster, orders: Orders) -> tuple[Floats, Ints, Ints]:
    """Border seconds of each kind of link, and the kind in front of and behind the stage of each edge."""
    if not cluster.links:
        none = np.zeros(len(orders.type), dtype=np.int64)
        return costs.border_seconds(cluster.link)[None, :], none, none
    kinds = len(orders.types)
    table = np.zeros((kinds + 1, kinds + 1), dtype=np.int64)  # the last row and column: no neighbour
    seconds = []
    for one in range(kinds):
        for other in range(kinds):
            table[one, other] = len(seconds)
            seconds.append(costs.border_seconds(_link(cluster, orders, one, other)))
    return np.array(seconds), table[orders.type, orders.before], table[orders.type, orders.behind]


def _link(cluster: Cluster, orders: Orders, one: int, other: int) -> Link:
    first, second = orders.types[one].devices[0], orders.types[other].devices[-1]
    return cluster.link_between(cluster.devices[first].name, cluster.devices[second].name)
