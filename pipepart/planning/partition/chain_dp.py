"""The best cut of a chain of layers into stages: smallest bottleneck, within each device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ..constraints import Constraints
from ..costs.layer_ranges import ChainCosts, Row
from ..costs.stage_memory import Floats, Recompute, StashCounts
from .device_orders import DeviceType, Ints, Orders, all_orders, device_types, devices_of, given_order
from .intervals import Intervals, best_intervals

_SAME = 1e-12
# Of cuts with equal bottlenecks the one whose stages take the least time in total, and of those the more even one.
_EVENNESS = 1e-3
# Edges of the device-state graph times layers. Above it only the cluster's own order of the devices is searched.
_MOST_WORK = 5_000_000


@dataclass(frozen=True)
class ChainCut:
    """A cut of a chain, and what is proven about it.

    Attributes:
        first_layers: the first layer of each stage.
        device_indices: the device of each stage, by its position in the cluster.
        bound: no cut that fits has a smaller bottleneck; 0 if that is not known.
        deficit_bytes: the largest deficit of memory of any device; 0 if the cut fits.
        exhaustive: True if no order of the devices and no cut was left out, so that none has a smaller deficit.
    """

    first_layers: tuple[int, ...]
    device_indices: tuple[int, ...]
    bound: float
    deficit_bytes: int
    exhaustive: bool


class ChainProblem:
    """A profiled chain to cut into one stage a device.

    Args:
        costs: of the layers.
        cluster: the devices. Stages may use any of them in any order.
        stages: number of stages.
        counts: the recompute modes that a stage may use, the fastest first, and the stash counts if all stages use it.
        constraints: of the user.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cluster: Cluster,
        stages: int,
        counts: Mapping[Recompute, StashCounts],
        constraints: Constraints,
    ) -> None:
        self._costs, self._cluster, self._stages, self._counts = costs, cluster, stages, counts
        self._modes = tuple(counts)
        self._ranges = constraints.stage_ranges(stages)
        self._types = device_types(cluster)
        self._groups = [kind.devices for kind in self._types]
        self._links = cluster.links_differ
        self._limited = any(device.memory_bytes is not None for device in cluster.devices)
        self._orders = all_orders(
            self._groups, stages, links=self._links, most_edges=_MOST_WORK // costs.layers
        )

    def best(self) -> ChainCut | None:
        """Return the cut with the smallest bottleneck; None if no cut fits.

        Exact, by :func:`.intervals.best_intervals`. It goes over suffixes because a stage's stash depends on the number
        of stages from it to the end. A guess of the bottleneck limits the ends that are looked at; a cut that is no
        worse than the guess is optimal. O(layers x longest stage x edges of the device-state graph).

        Reference: Zheng et al., "Alpa", OSDI 2022, section 5.2.
        """
        orders = self._orders
        found = self._least(orders, self._load, self._ends_within_seconds, self._first_guess())
        if found is None:
            return None
        if len(self._types) > 1 and self._stages == len(self._cluster):
            own = given_order(self._groups, range(self._stages), links=self._links)
            as_given = self._least(own, self._load, self._ends_within_seconds, found * (1 + _SAME))
            if as_given is not None and as_given <= found * (1 + _SAME):
                orders = own  # the user's own order is as good as any
        return self._evenest(orders, found)

    def nearest(self) -> ChainCut | None:
        """Return the cut with the smallest largest deficit of memory; None if no cut is possible at all."""
        orders = self._orders
        largest = max(kind.memory for kind in self._types)

        def ends(deficit: float) -> list[int]:
            return [
                self._costs.last_end_within_bytes(a, deficit + largest) for a in range(self._costs.layers)
            ]

        guess = (
            math.inf if math.isinf(largest) else self._costs.total_static_bytes / self._stages * 1.2 - largest
        )
        found = self._least(orders, self._deficit, ends, guess)
        if found is None:
            return None
        first_layers, device_indices = self._traced(orders, self._deficit, ends(found))
        exhaustive = orders.complete and not self._costs.skips  # whose memory has an upper bound here
        return ChainCut(first_layers, device_indices, 0.0, max(int(found), 0), exhaustive)

    def _first_guess(self) -> float:
        speeds = sorted((device.speed for device in self._cluster.devices), reverse=True)
        even = self._costs.total_seconds / sum(speeds[: self._stages])
        return 1.1 * max(even, float(self._costs.seconds.max()) / speeds[0])

    def _ends_within_seconds(self, limit: float) -> list[int]:
        fastest = max(kind.speed for kind in self._types)
        return [self._costs.last_end_within_seconds(a, limit * fastest) for a in range(self._costs.layers)]

    def _least(
        self, orders: Orders, value: _Value, last_ends: Callable[[float], list[int]], guess: float
    ) -> float | None:
        """The smallest possible largest value of any stage."""
        step = max(abs(guess), 1e-9)
        while True:
            ends = last_ends(guess)
            found = self._intervals(orders, value, ends, np.maximum).value
            if found <= guess or (min(ends) == self._costs.layers and not math.isfinite(found)):
                return found if math.isfinite(found) else None
            # A value that was found bounds the best one; otherwise look further.
            guess = found if math.isfinite(found) else guess + step
            step *= 2

    def _evenest(self, orders: Orders, limit: float) -> ChainCut:
        """Return the cut with the smallest sum of stage loads, among those whose bottleneck is ``limit``."""

        def value(row: Row, view: _View) -> Floats:
            load = self._load(row, view)
            penalty = load * (1 + _EVENNESS * load / limit) if limit else load
            return np.where(load <= limit * (1 + _SAME), penalty, np.inf)

        first_layers, devices = self._traced(orders, value, self._ends_within_seconds(limit), np.add)
        complete = self._orders.complete
        return ChainCut(first_layers, devices, self._bound(limit) if complete else 0.0, 0, complete)

    def _bound(self, found: float) -> float:
        """Return what no cut that fits can beat: ``found``, unless values that skip stages have upper bounds."""
        skips = self._costs.skips
        if not skips or (not self._limited and not skips.may_relay):
            return found
        if skips.may_relay:
            return 0.0
        lenient = partial(self._load, counts_waiting=False)  # more cuts fit than in truth
        return self._least(self._orders, lenient, self._ends_within_seconds, self._first_guess()) or 0.0

    def _traced(
        self, orders: Orders, value: _Value, last_ends: Sequence[int], joined: _Joined = np.maximum
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first layers and the devices of the stages of the cut with the least value."""
        first_layers, types = self._intervals(orders, value, last_ends, joined).stages()
        return first_layers, devices_of(self._groups, types)

    def _intervals(
        self, orders: Orders, value: _Value, last_ends: Sequence[int], joined: _Joined
    ) -> Intervals:
        view = _View(self._costs, self._cluster, self._types, orders)

        def rows() -> Iterator[tuple[int, Floats]]:
            for row in self._costs.rows(last_ends):
                values = value(row, view)
                yield (
                    row.start,
                    np.where(self._allowed(orders, row), values, np.inf) if self._ranges else values,
                )

        return best_intervals(orders, self._costs.layers, rows(), joined)

    def _allowed(self, orders: Orders, row: Row) -> NDArray[np.bool_]:
        """[edges, ends]: whether the pins let the edge's stage begin at the row's layer and have the end."""
        ends = np.arange(row.start + 1, row.start + 1 + len(row.seconds))
        allowed = np.zeros((self._stages + 1, len(ends)), dtype=bool)
        for left, (begin, end) in enumerate(reversed(self._ranges or ()), 1):
            if row.start in begin:
                allowed[left] = (ends >= end.start) & (ends < end.stop)
        return allowed[orders.left]

    def _load(self, row: Row, view: _View, counts_waiting: bool = True) -> Floats:
        """[edges, ends]: seconds of a stage; infinite if it does not fit."""
        seconds = row.seconds * view.pace + view.transfer(row)
        if view.unlimited and self._modes[0] == "never":
            return seconds
        found = np.full(seconds.shape, np.inf)
        for mode in self._modes:
            fits = self._need(row, view, mode, counts_waiting) <= view.memory
            taken = seconds if mode == "never" else seconds + row.recompute_seconds * view.pace
            found = np.minimum(found, np.where(fits, taken, np.inf))
            if fits.all():
                break
        return found

    def _deficit(self, row: Row, view: _View) -> Floats:
        """[edges, ends]: bytes that a stage is short of in the mode with the least memory; negative if it fits."""
        deficit = self._need(row, view, self._modes[-1]) - view.memory
        return np.where(np.isfinite(view.transfer(row)), deficit, np.inf)

    def _need(self, row: Row, view: _View, mode: Recompute, counts_waiting: bool = True) -> Floats:
        """[edges, ends]: the peak bytes of a stage; an upper bound where values wait for a stage behind the next."""
        counts, place = self._counts[mode], self._stages - view.left
        need = counts.peak_bytes_of_stages(row.sizes)[place]
        if row.waiting is None or not counts_waiting:
            return need
        most = counts.peak_bytes_of_stages(row.sizes.with_waiting(row.waiting[:, None]))[place]
        return np.where((view.left > 2)[:, None], most, need)  # the last two stages have none behind the next


class _View:
    """The edges of the device-state graph as columns, to broadcast over the ends of a row."""

    def __init__(
        self, costs: ChainCosts, cluster: Cluster, types: Sequence[DeviceType], orders: Orders
    ) -> None:
        self.pace = 1 / np.array([kind.speed for kind in types])[orders.type][:, None]
        self.memory = np.array([kind.memory for kind in types])[orders.type][:, None]
        self.unlimited = bool(np.isinf(self.memory).all())
        self.left = orders.left
        self._links, self._before, self._after = _links(costs, cluster, types, orders)
        rate = cluster.link.bandwidth
        self._per_byte = (
            np.r_[0.0, np.where(costs.trained, 2, 1)] / rate if rate else np.zeros(costs.layers + 1)
        )

    def transfer(self, row: Row) -> Floats:
        """Seconds of a stage's borders, without values that go past it.

        Exact where all links are alike: then every value goes straight. Else an upper bound, as a value that is not
        used may be relayed, which hangs on the devices before and behind.
        """
        ends = slice(row.start + 1, row.start + 1 + len(row.seconds))
        if len(self._links) == 1:
            seconds = self._links[0, row.start] + self._links[0, ends]
            if row.passing is not None:
                past = row.passing * (self._per_byte[row.start] + self._per_byte[ends])
                seconds = np.maximum(seconds - past, 0.0)  # estimated bytes are rounded
            return seconds[None, :]
        return self._links[self._before, row.start][:, None] + self._links[self._after, ends]


_Value = Callable[[Row, _View], Floats]
_Joined = Callable[[Floats, Floats], Floats]


def _links(
    costs: ChainCosts, cluster: Cluster, types: Sequence[DeviceType], orders: Orders
) -> tuple[Floats, Ints, Ints]:
    """Border seconds of each kind of link, and the kind before and after the stage of each edge."""
    if not cluster.links_differ:
        none = np.zeros(len(orders.type), dtype=np.int64)
        return costs.border_seconds(cluster.link)[None, :], none, none
    kinds = len(types)
    table = np.zeros((kinds + 1, kinds + 1), dtype=np.int64)  # the last row and column: no neighbour
    table[:kinds, :kinds] = np.arange(kinds * kinds).reshape(kinds, kinds)
    # Two devices of one type are different ones.
    seconds = [
        costs.border_seconds(
            cluster.link_between(
                cluster.devices[one.devices[0]].name, cluster.devices[other.devices[-1]].name
            )
        )
        for one in types
        for other in types
    ]
    return np.array(seconds), table[orders.type, orders.before], table[orders.type, orders.after]
