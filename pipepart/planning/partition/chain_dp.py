"""Dynamic program that cuts a chain into stages with the smallest bottleneck, within each device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schedules.searching.clock import Clock

from ...cluster import Cluster
from ...graph_partition.device_orders import devices_of
from ...graph_partition.intervals import Intervals, best_intervals
from ..costs.layer_ranges import ChainCosts, Row
from ..costs.stage_memory import RECOMPUTES, Floats, Mode, StashCounts
from .order_search import OrderSpaces, Space

_SAME = 1e-12  # bottlenecks with a smaller relative difference count as equal
# Of cuts with equal bottlenecks, choose the smallest sum of stage loads; this weight also favours even loads.
_EVENNESS = 1e-3


@dataclass(frozen=True)
class ChainCut:
    """A cut of a chain, with a lower bound of the bottleneck.

    Attributes:
        first_layers: the first layer of each stage.
        device_indices: the device of each stage, by its position in the cluster.
        bound: a lower bound in seconds of the bottleneck of all cuts that fit; 0 if no bound is known.
    """

    first_layers: tuple[int, ...]
    device_indices: tuple[int, ...]
    bound: float


class ChainProblem:
    """A profiled chain to cut into one stage per device.

    Args:
        costs: the costs of the layers.
        spaces: the orders of the devices to search.
        stages: the number of stages.
        counts: the modes that a stage may use, the fastest first, each with the stash counts if all stages use it.
            Copies of offloaded stashes are assumed to keep up with the computation.
        clock: the time limit. When it is over, every method raises :class:`OutOfTime`.
        limited: False to find the best cut without memory limits, in the first mode.
    """

    def __init__(
        self,
        costs: ChainCosts,
        spaces: OrderSpaces,
        stages: int,
        counts: Mapping[Mode, StashCounts],
        clock: Clock,
        *,
        limited: bool = True,
    ) -> None:
        self._clock, self._spaces, self._cluster = clock, spaces, spaces.cluster
        self._costs, self._stages, self._counts = costs, stages, counts
        self._modes = tuple(counts)
        self._types = self._spaces.types
        self._limited = limited and costs.may_exceed(min(kind.memory for kind in self._types))
        self._all = self._spaces.all(stages)

    def best(self) -> ChainCut | None:
        """Return the cut with the smallest bottleneck; None if no cut fits.

        If the device-state graph has few edges, the cut is optimal, by :func:`.intervals.best_intervals`. The dynamic
        program goes over suffixes of the chain, because a stage's stash depends on the number of stages from it to the
        end. A guess of the bottleneck limits the stage ends to try; a cut that is no worse than the guess is optimal.
        O(layers x longest stage x edges of the device-state graph).

        If the graph has more edges, the cut is the best for a few orders of the devices. The bound is then the larger
        of an even load and the bottleneck of devices and links that are all as good as the best.

        Reference: Zheng et al., "Alpa", OSDI 2022, section 5.2.
        """
        space = self._all
        if space is None:
            return self._best_of_some()
        bottleneck = self._least_load(space, self._first_guess())
        if bottleneck is None:
            return None
        if len(self._types) > 1 and self._stages == len(self._cluster):
            user_order = self._spaces.given(range(self._stages))
            of_user_order = self._least_load(user_order, bottleneck * (1 + _SAME))
            if of_user_order is not None and of_user_order <= bottleneck * (1 + _SAME):
                space = user_order  # prefer the user's order if no order is better
        return self._evenest(space, bottleneck, 0.0 if self._is_estimated else bottleneck)

    def _best_of_some(self) -> ChainCut | None:
        """Return the best cut for a few orders of the devices."""
        bound = self._least_load(self._spaces.relaxed(self._stages), self._first_guess())
        if bound is None:
            return None
        smallest, best_space = math.inf, None
        for order in self._spaces.few(self._stages):
            space = self._spaces.given(order)
            bottleneck = self._least_load(space, min(self._first_guess(), smallest))
            if bottleneck is not None and bottleneck < smallest * (1 - _SAME):
                smallest, best_space = bottleneck, space
        if best_space is None:
            return None
        bound = max(bound, self._even_seconds)  # the largest load is no less than an even one
        return self._evenest(best_space, smallest, 0.0 if self._is_estimated else min(bound, smallest))

    @property
    def _is_estimated(self) -> bool:
        """True if the memory or the transfers of skip connections are only known as upper bounds."""
        return bool(self._costs.skips) and (self._limited or self._cluster.links_differ)

    def _first_guess(self) -> float:
        fastest = max(kind.speed for kind in self._types)
        return 1.1 * max(self._even_seconds, float(self._costs.seconds.max()) / fastest)

    @property
    def _even_seconds(self) -> float:
        """The seconds of a micro-batch on each device if the fastest devices share all layers evenly."""
        speeds = sorted((device.speed for device in self._cluster.devices), reverse=True)
        return self._costs.total_seconds / sum(speeds[: self._stages])

    def _longest_ends(self, limit: float) -> list[int]:
        """Return [layers]: the last end of a stage from each layer on, on the fastest and largest device."""
        seconds = limit * max(kind.speed for kind in self._types)
        memory = max(kind.memory for kind in self._types) if self._limited else math.inf
        return [self._costs.last_end_within(a, seconds, memory) for a in range(self._costs.layers)]

    def _least_load(self, space: Space, guess: float) -> float | None:
        """Return the smallest bottleneck of a cut that fits, starting from a guess; None if no cut fits."""
        step, longest = max(abs(guess), 1e-9), self._longest_ends(math.inf)
        while True:
            ends = self._longest_ends(guess)
            bottleneck = self._intervals(space, self._load, ends, np.maximum).value
            if bottleneck <= guess or (ends == longest and not math.isfinite(bottleneck)):
                return bottleneck if math.isfinite(bottleneck) else None
            # The bottleneck of a cut is an upper bound of the smallest. Without a cut, raise the guess.
            guess = bottleneck if math.isfinite(bottleneck) else guess + step
            step *= 2

    def _evenest(self, space: Space, limit: float, bound: float) -> ChainCut:
        """Return the cut with the smallest sum of stage loads, among the cuts whose bottleneck is ``limit``."""

        def value(row: Row, view: _View) -> Floats:
            load = self._load(row, view)
            penalty = load * (1 + _EVENNESS * load / limit) if limit else load
            return np.where(load <= limit * (1 + _SAME), penalty, np.inf)

        ends = self._longest_ends(limit)
        first_layers, types = self._intervals(space, value, ends, np.add).stages()
        return ChainCut(first_layers, devices_of(space.groups, types), bound)

    def _intervals(self, space: Space, value: _Value, last_ends: Sequence[int], joined: _Joined) -> Intervals:
        view = _View(self._costs, self._cluster, space)

        def rows() -> Iterator[tuple[int, Floats]]:
            for row in self._costs.rows(last_ends, with_sizes=self._limited):
                self._clock.check()
                yield row.start, value(row, view)

        return best_intervals(space.orders, self._costs.layers, rows(), joined)

    def _load(self, row: Row, view: _View) -> Floats:
        """Return the seconds of a stage, infinite if it does not fit: [edges, ends]."""
        seconds = row.seconds * view.pace + view.transfer(row)
        if not self._limited:
            return seconds + row.recompute_seconds * view.pace if self._modes[0] in RECOMPUTES else seconds
        load = np.full(seconds.shape, np.inf)
        for mode in self._modes:
            fits = self._need(row, view, mode) <= view.memory
            of_mode = seconds + row.recompute_seconds * view.pace if mode in RECOMPUTES else seconds
            load = np.minimum(load, np.where(fits, of_mode, np.inf))
            if fits.all():
                break
        return load

    def _need(self, row: Row, view: _View, mode: Mode) -> Floats:
        """Return the peak bytes of a stage, [edges, ends]; an upper bound with skip connections."""
        assert row.sizes is not None
        counts, place = self._counts[mode], self._stages - view.left
        need = counts.peak_bytes_of_stages(row.sizes)[place]
        if row.waiting is None:
            return need
        most = counts.peak_bytes_of_stages(row.sizes.with_waiting(row.waiting[:, None]))[place]
        # Nothing waits at the last two stages: there is no stage after their next.
        return np.where((view.left > 2)[:, None], most, need)


class _View:
    """The edges of the device-state graph as columns, to broadcast over the ends of a row."""

    def __init__(self, costs: ChainCosts, cluster: Cluster, space: Space) -> None:
        types, orders, links = space
        self.pace = 1 / np.array([kind.speed for kind in types])[orders.type][:, None]
        self.memory = np.array([kind.memory for kind in types])[orders.type][:, None]
        self.left = orders.left
        self._links = np.array([costs.border_seconds(link) for link in links])
        self._before, self._after = orders.before, orders.after
        self._per_byte = np.r_[0.0, np.where(costs.trained, 2, 1)] * cluster.link.seconds_per_byte

    def transfer(self, row: Row) -> Floats:
        """Return the transfer seconds of both borders of a stage, without values that go past it: [edges, ends].

        With unlike links and skip connections they are an upper bound: values that go past the stage count as well.
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
