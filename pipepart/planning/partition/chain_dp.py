"""The best cut of a chain of layers into stages: smallest bottleneck, within each device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from schedules.searching.clock import Clock

from ...cluster import Cluster
from ...graph_partition.device_orders import Orders, devices_of
from ...graph_partition.intervals import Intervals, best_intervals
from ..constraints import Constraints
from ..costs.layer_ranges import ChainCosts, Row
from ..costs.stage_memory import RECOMPUTES, Floats, Mode, StashCounts, least_memory
from .order_search import OrderSpaces, Space, first_orders, order_of_runs

_SAME = 1e-12
# Of cuts with equal bottlenecks the one whose stages take the least time in total, and of those the more even one.
_EVENNESS = 1e-3
# Edges of the device-state graph times layers, up to which all orders of the devices are searched.
_MOST_WORK = 250_000
_CLOSE = (
    1.2  # above the bound of relaxed orders, up to which a bottleneck is good enough to try no further order
)


@dataclass(frozen=True)
class ChainCut:
    """A cut of a chain, and what is proven about it.

    Attributes:
        first_layers: the first layer of each stage.
        device_indices: the device of each stage, by its position in the cluster.
        bound: no cut that fits has a smaller bottleneck; 0 if that is not known.
    """

    first_layers: tuple[int, ...]
    device_indices: tuple[int, ...]
    bound: float


def order_spaces(cluster: Cluster, layers: int) -> OrderSpaces:
    """Return the orders of devices to search for a chain of so many layers."""
    return OrderSpaces(cluster, _MOST_WORK // layers)


class ChainProblem:
    """A profiled chain to cut into one stage a device.

    Args:
        costs: of the layers.
        cluster: the devices. Stages may use any of them in any order.
        stages: number of stages.
        counts: the modes that a stage may use, the fastest first, and the stash counts if all stages use it. Copies of
            stages that offload are taken to keep up with the computation.
        constraints: of the user.
        clock: that every method looks at. After it they raise :class:`OutOfTime`.
        spaces: the orders of the devices, from :func:`order_spaces`; None to compute them.
        limited: False to find the best cut as if memory had no limit, in the first of the modes.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cluster: Cluster,
        stages: int,
        counts: Mapping[Mode, StashCounts],
        constraints: Constraints,
        clock: Clock | None = None,
        spaces: OrderSpaces | None = None,
        *,
        limited: bool = True,
    ) -> None:
        self._clock = clock or Clock()
        self._spaces = spaces or order_spaces(cluster, costs.layers)
        self._costs, self._cluster, self._stages, self._counts = costs, cluster, stages, counts
        self._modes = tuple(counts)
        self._ranges = constraints.stage_ranges(stages)
        self._types = self._spaces.types
        self._limited = limited and costs.may_exceed(least_memory(cluster))
        self._all = self._spaces.all(stages)

    def best(self) -> ChainCut | None:
        """Return the cut with the smallest bottleneck; None if no cut fits.

        Exact, by :func:`.intervals.best_intervals`, if the device-state graph has few edges. It goes over suffixes
        because a stage's stash depends on the number of stages from it to the end. A guess of the bottleneck limits the
        ends that are looked at; a cut that is no worse than the guess is optimal. O(layers x longest stage x edges of
        the device-state graph). If it has more edges, the best cut of a few orders, with the bound of relaxed orders.

        Reference: Zheng et al., "Alpa", OSDI 2022, section 5.2.
        """
        space = self._all
        if space is None:
            return self._best_of_some()
        found = self._least_load(space, self._first_guess())
        if found is None:
            return None
        if len(self._types) > 1 and self._stages == len(self._cluster):
            own = self._spaces.given(range(self._stages))
            as_given = self._least_load(own, found * (1 + _SAME))
            if as_given is not None and as_given <= found * (1 + _SAME):
                space = own  # the user's own order is as good as any
        return self._evenest(space, found, self._bound(space, found))

    def _best_of_some(self) -> ChainCut | None:
        """Return the best cut on a few orders of the devices, with the bound of the relaxed orders."""
        relaxed, are_runs = self._spaces.relaxed(self._stages)
        low = self._least_load(relaxed, self._first_guess())
        if low is None:
            return None
        least, best = math.inf, None
        for order in [
            *self._from_relaxed(relaxed, low, are_runs),
            *first_orders(self._cluster, self._stages),
        ]:
            space = self._spaces.given(order)
            found = self._least_load(space, min(low * 1.01, least))
            if found is not None and found < least * (1 - _SAME):
                least, best = found, space
            if least <= low * _CLOSE:
                break
        if best is None:
            return None
        return self._evenest(best, least, min(self._bound(relaxed, low), least))

    def _from_relaxed(self, relaxed: Space, low: float, are_runs: bool) -> list[tuple[int, ...]]:
        """Return the order of devices that the relaxed cut stands for; none if the hosts have no room for its runs.

        Of the devices that were rounded to one type, the fastest take the stages with most seconds.
        """
        ends = self._ends_within_seconds(low)
        first_layers, edges = self._intervals(relaxed, self._load, ends, np.maximum).walk()
        if are_runs:
            runs: list[int] = []
            for edge in edges:
                if relaxed.orders.before[edge] or not runs:
                    runs.append(0)
                runs[-1] += 1
            order = order_of_runs(self._cluster, runs)
            return [] if order is None else [order]
        types = relaxed.orders.type[list(edges)]
        seconds = np.diff(self._costs.compute_sums[[*first_layers, self._costs.layers]])
        devices = np.zeros(self._stages, dtype=np.int64)
        for kind, group in enumerate(relaxed.groups):
            stages = np.flatnonzero(types == kind)
            fastest = sorted(group, key=lambda at: -self._cluster.devices[at].speed)[: len(stages)]
            devices[stages[np.argsort(-seconds[stages], kind="stable")]] = fastest
        return [tuple(devices.tolist())]

    def _first_guess(self) -> float:
        speeds = sorted((device.speed for device in self._cluster.devices), reverse=True)
        even = self._costs.total_seconds / sum(speeds[: self._stages])
        return 1.1 * max(even, float(self._costs.seconds.max()) / speeds[0])

    def _ends_within_seconds(self, limit: float) -> list[int]:
        fastest = max(kind.speed for kind in self._types)
        return [self._costs.last_end_within_seconds(a, limit * fastest) for a in range(self._costs.layers)]

    def _least_load(self, space: Space, guess: float) -> float | None:
        """The smallest possible bottleneck."""
        return self._least(space, self._load, self._ends_within_seconds, guess)

    def _least(
        self, space: Space, value: _Value, last_ends: Callable[[float], list[int]], guess: float
    ) -> float | None:
        """The smallest possible largest value of any stage."""
        step = max(abs(guess), 1e-9)
        while True:
            ends = last_ends(guess)
            found = self._intervals(space, value, ends, np.maximum).value
            if found <= guess or (min(ends) == self._costs.layers and not math.isfinite(found)):
                return found if math.isfinite(found) else None
            # A value that was found bounds the best one; otherwise look further.
            guess = found if math.isfinite(found) else guess + step
            step *= 2

    def _evenest(self, space: Space, limit: float, bound: float) -> ChainCut:
        """Return the cut with the smallest sum of stage loads, among those whose bottleneck is ``limit``."""

        def value(row: Row, view: _View) -> Floats:
            load = self._load(row, view)
            penalty = load * (1 + _EVENNESS * load / limit) if limit else load
            return np.where(load <= limit * (1 + _SAME), penalty, np.inf)

        first_layers, devices = self._traced(space, value, self._ends_within_seconds(limit), np.add)
        return ChainCut(first_layers, devices, bound)

    def _bound(self, space: Space, found: float) -> float:
        """Return what no cut that fits can beat: ``found``, unless values that skip stages have upper bounds."""
        skips = self._costs.skips
        if not skips or (not self._limited and not skips.may_relay):
            return found
        if skips.may_relay:
            return 0.0
        lenient = partial(self._load, counts_waiting=False)  # more cuts fit than in truth
        return self._least(space, lenient, self._ends_within_seconds, self._first_guess()) or 0.0

    def _traced(
        self, space: Space, value: _Value, last_ends: Sequence[int], joined: _Joined = np.maximum
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first layers and the devices of the stages of the cut with the least value."""
        first_layers, types = self._intervals(space, value, last_ends, joined).stages()
        return first_layers, devices_of(space.groups, types)

    def _intervals(self, space: Space, value: _Value, last_ends: Sequence[int], joined: _Joined) -> Intervals:
        view, orders = _View(self._costs, self._cluster, space), space.orders

        def rows() -> Iterator[tuple[int, Floats]]:
            for row in self._costs.rows(last_ends, with_sizes=self._limited):
                self._clock.check()
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
        if not self._limited:
            return seconds + row.recompute_seconds * view.pace if self._modes[0] in RECOMPUTES else seconds
        found = np.full(seconds.shape, np.inf)
        for mode in self._modes:
            fits = self._need(row, view, mode, counts_waiting) <= view.memory
            taken = seconds + row.recompute_seconds * view.pace if mode in RECOMPUTES else seconds
            found = np.minimum(found, np.where(fits, taken, np.inf))
            if fits.all():
                break
        return found

    def _need(self, row: Row, view: _View, mode: Mode, counts_waiting: bool = True) -> Floats:
        """[edges, ends]: the peak bytes of a stage; an upper bound where values wait for a stage behind the next."""
        counts, place = self._counts[mode], self._stages - view.left
        need = counts.peak_bytes_of_stages(row.sizes)[place]
        if row.waiting is None or not counts_waiting:
            return need
        most = counts.peak_bytes_of_stages(row.sizes.with_waiting(row.waiting[:, None]))[place]
        return np.where((view.left > 2)[:, None], most, need)  # the last two stages have none behind the next


class _View:
    """The edges of the device-state graph as columns, to broadcast over the ends of a row."""

    def __init__(self, costs: ChainCosts, cluster: Cluster, space: Space) -> None:
        types, orders, links = space
        self.pace = 1 / np.array([kind.speed for kind in types])[orders.type][:, None]
        self.memory = np.array([kind.memory for kind in types])[orders.type][:, None]
        self.left = orders.left
        self._links = np.array([costs.border_seconds(link) for link in links])
        self._before, self._after = orders.before, orders.after
        rate = cluster.link.message_bandwidth
        self._per_byte = (
            np.r_[0.0, np.where(costs.trained, 2, 1)] / rate if rate else np.zeros(costs.layers + 1)
        )

    def transfer(self, row: Row) -> Floats:
        """Seconds of a stage's borders, without values that go past it.

        Exact where all links are alike: then every value goes straight. Else an upper bound, as a value that is not
        used may be passed on by others, which depends on the devices before and behind.
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
