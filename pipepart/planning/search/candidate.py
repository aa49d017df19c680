"""Candidate: one way to run a model, without the cut: schedule, devices, stages a device, recompute modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise

import numpy as np

import schedules
from schedules.searching.clock import Clock, OutOfTime

from ...cluster import Cluster, Link
from ...graph_partition.device_orders import distinct_orders
from ...units import counted
from ..costs.crossings import Borders
from ..costs.cut_costs import CutCosts
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODE_SETS, Floats, Ints, Mode, ModeChoice, StashCounts, with_modes
from ..infeasible import Infeasible, explain_infeasible
from ..partition.chain_dp import ChainCut, ChainProblem, order_spaces
from ..partition.local_search import EvaluatedCut, LocalSearch, proportional_borders
from ..partition.order_search import OrderSpaces, first_orders
from ..partition.reductions import runs_all_reduce
from ..plans.plan import Plan
from ..plans.stage_plan import StagePlan
from ..request import ASYNCHRONOUS, BIDIRECTIONAL, DEFERRING
from .parts import Part
from .step_times import Levels, StepTimes, has_bandwidth

# Cuts times actions of the schedule that are evaluated for one candidate: about 10 ms. A fixed number, so that a
# candidate has the same plan whatever the other candidates are.
_EFFORT = 600_000
_MOST_ORDERED = 12  # devices that are not all alike, up to which their orders are counted
_LEAST_EVALUATED = 64  # cuts, of a schedule with very many actions
# Seconds to build, evaluate and simulate a candidate, for each of its stages and micro-batches. Only what is too large
# for the clock is left out for it.
_SECONDS_EACH = 70e-6
_SECONDS_EACH_CHUNKED = 130e-6  # of schedules with several stages a device
_SECONDS_EACH_STAGE = 2e-3
_SECONDS_EACH_SEARCHED = 500e-6  # of schedules that are found by a search of their own
_SEARCHED = ("v-half", "v-min")


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, without the cut: finds a cut, makes the plan of a cut, or tells why there is none.

    Attributes:
        part: of the request: the layers, the devices, and the number of micro-batches.
        costs: of the layers; one of those of the part.
        schedule: its name.
        chunks: stages of each device.
        devices: of one replica.
        choice: the modes that stages may use.
    """

    part: Part
    costs: ChainCosts
    schedule: str
    chunks: int
    devices: int
    choice: ModeChoice

    @property
    def cluster(self) -> Cluster:
        """The devices that a stage of one replica may be on."""
        return self.part.groups.cluster

    @property
    def stages(self) -> int:
        """Stages of one replica."""
        return self.devices * self.chunks

    @property
    def size(self) -> int:
        """Stages times micro-batches, which the time to plan the candidate grows with."""
        return self.stages * self.part.micro_batches

    @property
    def planning_seconds(self) -> float:
        """An estimate of the seconds to plan the candidate, without the search for cuts, which looks at the clock."""
        each = _SECONDS_EACH if self.chunks == 1 else _SECONDS_EACH_CHUNKED
        each = _SECONDS_EACH_SEARCHED if self.schedule in _SEARCHED else each
        return self.size * each + self.stages * _SECONDS_EACH_STAGE

    @cached_property
    def shortest_possible_step(self) -> float:
        """Seconds that no plan can beat."""
        costs, counts = self.costs, self.costs.micro_batches
        least = self.part.least_seconds(self.devices)
        if self.schedule == "sequential" and costs.split is None:  # one device at a time
            fastest = max(device.speed for device in self.cluster.devices)
            least = max(least, self.costs.total_seconds * (counts // self.part.groups.replicas) / fastest)
        repeated = {"always": counts, "except-last": max(counts - self.part.groups.replicas, 0)}
        if self.choice not in repeated:
            return least
        saved = 0.0 if costs.split is None else -float(costs.split.clip(max=0.0).sum())
        again = repeated[self.choice] * float(costs.forward[costs.has_backward].sum())
        work = (costs.total_seconds - saved) * counts + again
        return max(least, work / self.part.fastest_speed(self.devices))

    @property
    def likely_step(self) -> float:
        """A guess of its step, to try the best ones first: even stages, idle while the pipeline fills and drains."""
        waits = 1 / 3 if self.schedule in DEFERRING else 1.0
        return self.shortest_possible_step * (
            1 + waits * (self.devices - 1) / (self.part.micro_batches * self.chunks)
        )

    @cached_property
    def impossible_reason(self) -> str:
        """Why no such cut exists, however much memory there is; empty if that is not known."""
        stages, pins, groups = self.stages, self.part.request.constraints.pins, self.part.groups
        fixed = self.part.request.constraints.stages
        if self.chunks > 1 and self.devices == 1:
            return "several stages on a single device gain nothing"
        if stages > self.costs.layers:
            return f"{stages} stages, and the model has {self.costs.layers} layers"
        if fixed not in (None, stages):
            return f"{stages} stages, and cut_before makes {fixed}"
        if any(stage >= stages for stage in pins.values()):
            return f"pin has a layer in stage {max(pins.values())}, and there are {stages} stages"
        if groups.replicas > self.costs.micro_batches:
            return (
                f"{counted(self.costs.micro_batches, 'micro-batch', 'es')} cannot be shared by "
                f"{groups.replicas} replicas of the model"
            )
        if groups.replicas > 1 and self.schedule in ASYNCHRONOUS:
            return "it is asynchronous: replicas would have to agree on their weights within a step"
        try:
            _ = self.bare_schedule
        except schedules.ScheduleError as error:
            return str(error)
        return ""

    @property
    def has_cuts(self) -> bool:
        """True if enough borders are allowed for a cut into so many stages."""
        return len(self.costs.allowed_borders) >= self.stages - 1

    @property
    def is_exact(self) -> bool:
        """True if the evaluated seconds of a cut are those of its plan: nothing shares a port, nothing is summed."""
        return not self.cluster.network and self.part.groups.replicas * self.cut_costs.copies == 1

    def smallest_bottleneck(self, clock: Clock | None = None) -> ChainCut | None:
        """Return the cut with the smallest bottleneck, for one stage a device; None if none fits.

        Raises:
            OutOfTime: the clock is over.
        """
        cut = self._bottleneck_without_limits(clock)
        if cut is None or not self._is_limited:
            return cut
        # Schedules that place stages alike share the cut without limits. If it fits, it is the best one.
        borders = np.array([cut.first_layers[1:]], dtype=np.int64).reshape(1, -1)
        modes, deficits = self.cut_costs.memory(borders, np.array([self.order_of(cut)]))
        if deficits[0] <= 0 and not modes.any():
            return cut
        key = "limited cut", id(self.costs), self._structure, self.choice
        return self.part.once(key, lambda: self._problem(clock).best())

    def step_with_least_bottleneck(self, clock: Clock) -> float:
        """Return seconds that no plan can beat, as the device with the largest load computes for all micro-batches.

        0 where that proves nothing: with several stages a device, or backwards that are faster in parts.

        Raises:
            OutOfTime: the clock is over.
        """
        faster_split = self.costs.split is not None and bool((self.costs.split < 0).any())
        if not self._is_plain or faster_split or self.choice in ("always", "except-last"):
            return 0.0
        cut = self._bottleneck_without_limits(clock)
        if cut is None:
            return 0.0
        transfers = np.array([self.costs.border_seconds(link) for link in self._links])
        compute = cut.bound - 2 * float(transfers[np.isfinite(transfers)].max())
        return (self.costs.micro_batches // self.part.groups.replicas) * compute

    def best_cuts(self, clock: Clock) -> tuple[list[EvaluatedCut], float]:
        """Return cuts that fit, the shortest step first, and a lower bound of the bottleneck; no cuts if none fits."""
        cuts, bound, _ = self._nearest_cuts(clock)
        fitting = [cut for cut in cuts if not cut.deficit]
        # Where values skip stages the memory of a cut is an upper bound: the plan may still fit.
        return fitting or (cuts[:1] if self.costs.skips else []), bound

    def _nearest_cuts(self, clock: Clock) -> tuple[list[EvaluatedCut], float, bool]:
        """Return cuts, those with the smallest deficit and of these the shortest step first.

        Every cut is evaluated on every order of the devices if they are few. Else a local search starts from the cut
        with the smallest bottleneck, or from stages in proportion to the speeds of their devices.

        Returns:
            The cuts, a lower bound of the bottleneck of those that fit, and True if every cut was evaluated.
        """
        if self.impossible_reason or not self.has_cuts:
            return [], 0.0, False
        cut, searched = None, False
        if self._is_plain:
            try:
                cut = self._bottleneck_without_limits(clock)
                if cut is None:
                    return [], 0.0, False
                # With a few orders of many the cut within the limits is no better than what the local search finds.
                if self._is_limited and self._spaces.all(self.devices):
                    cut, searched = self.smallest_bottleneck(clock) or replace(cut, bound=0.0), True
            except OutOfTime:
                pass
        bound = cut.bound if cut else 0.0
        if self.tries_every_cut:
            return self._search(clock).best_of_all(self._orders), bound, True
        starts = [(cut.first_layers[1:], self.order_of(cut))] if cut else self._proportional_cuts()
        found = self._climbed(starts, clock)
        if cut and not searched and found and found[0].deficit:
            with suppress(OutOfTime):
                if (limited := self.smallest_bottleneck(clock)) is not None:
                    found = self._climbed([(limited.first_layers[1:], self.order_of(limited))], clock)
        return found, bound, False

    def _bottleneck_without_limits(self, clock: Clock | None) -> ChainCut | None:
        """Return the cut with the smallest bottleneck as if memory had no limit; None if no cut is possible."""
        recomputes = self.choice in ("always", "except-last")
        key = "cut", id(self.costs), self.devices, self.bare_schedule.device_of, recomputes
        return self.part.once(key, lambda: self._problem(clock, limited=False).best())

    def evaluate(self, borders: Borders, orders: Ints) -> tuple[Floats, Floats]:
        """Return the bytes that the device with the largest deficit lacks, and the seconds of a step, of each cut.

        Args:
            borders: [cuts, borders].
            orders: the device of each schedule row, by its position in the cluster: [cuts, rows].
        """
        modes, deficits = self.cut_costs.memory(borders, orders)
        return deficits, self.step_times.of(borders, modes, orders)

    def least_with_splits(self, cuts: Sequence[EvaluatedCut]) -> float:
        """Return seconds that no plan of these cuts can beat, whichever of its backwards are split."""
        borders = np.array([cut.borders for cut in cuts], dtype=np.int64).reshape(len(cuts), -1)
        orders = np.array([cut.order for cut in cuts])
        modes, _ = self.cut_costs.memory(borders, orders)
        splits = self.costs.split is not None
        return float(self.step_times.of(borders, modes, orders, splits=splits).min())

    def infeasible(self, clock: Clock) -> Infeasible:
        """Explain why no plan fits, with the cut that comes nearest."""
        if self.impossible_reason:
            where = f"schedule {self.schedule!r} on {counted(self.devices, 'device')}"
            return Infeasible(f"{where}: {self.impossible_reason}")
        cuts, _, tried_all = self._nearest_cuts(clock)
        if not cuts:
            return Infeasible(
                f"no cut into {counted(self.stages, 'stage')} is possible: layers that share parameters or buffers, or "
                "that colocate names, are in one stage"
            )
        nearest = self.plan_of(cuts[0].borders, cuts[0].order, bound=0.0)
        exact = tried_all and not self.costs.skips  # whose memory has an upper bound here
        return explain_infeasible(nearest, int(cuts[0].deficit) if exact else None)

    @cached_property
    def bare_schedule(self) -> schedules.Schedule:
        """The schedule of one replica, without recomputes."""
        name, devices, micro_batches, chunks = self._structure
        return self.part.once(
            ("schedule", self._structure),
            lambda: schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks),
        )

    @cached_property
    def cut_costs(self) -> CutCosts:
        """The memory and modes of cuts. Each stage may have its own mode: it does not affect the counts of others."""
        # Without a limit the fastest mode fits.
        modes = MODE_SETS[self.choice][: None if self._is_limited else 1]
        groups, bare = self.part.groups, self.bare_schedule
        summed = (1 if runs_all_reduce(groups.all_devices) else groups.replicas) * bare.replicas
        counts: dict[Mode, StashCounts] = {
            mode: self.part.once(
                ("counts", self._structure, mode),
                lambda mode=mode: StashCounts(with_modes(bare, [mode]), replicas=summed),
            )
            for mode in modes
        }
        return CutCosts(self.costs, self.cluster, bare.device_of, counts, bare.replicas)

    @cached_property
    def step_times(self) -> StepTimes:
        """Simulates one step of one replica for many cuts at once."""
        key = "levels", self._structure, self.cut_costs.may_recompute
        recompute, on_links = self.cut_costs.may_recompute, has_bandwidth(self.cluster)
        levels = self.part.once(key, lambda: Levels(self.bare_schedule, recompute, on_links))
        return StepTimes(self.cut_costs, levels)

    @cached_property
    def tries_every_cut(self) -> bool:
        """True if there are so few cuts and orders of the devices that each is evaluated."""
        if self.devices > _MOST_ORDERED and len(self._spaces.types) > 1:
            return False
        cuts = math.comb(len(self.costs.allowed_borders), self.stages - 1)
        most = _EFFORT // (self.step_times.actions * max(cuts, 1))
        return len(self._some_orders(most + 1)) <= most if most else False

    @property
    def _orders(self) -> list[tuple[int, ...]]:
        """All orders of the devices that differ, where every cut is tried."""
        return self._some_orders(_EFFORT)

    def _some_orders(self, most: int) -> list[tuple[int, ...]]:
        """Return orders of the devices that cost different amounts; the first ``most``."""
        return self.part.once(
            ("orders", self.devices, most), lambda: list(islice(distinct_orders(self.cluster, self.devices), most))
        )  # fmt: skip

    def _search(self, clock: Clock) -> LocalSearch:
        return LocalSearch(
            self._rows,
            self.costs.allowed_borders,
            self.part.request.constraints.keep_pins,
            self._spaces.types,
            self.evaluate,
            max(_EFFORT // self.step_times.actions, _LEAST_EVALUATED),
            clock,
        )

    def _climbed(
        self, starts: Sequence[tuple[Sequence[int], Sequence[int]]], clock: Clock
    ) -> list[EvaluatedCut]:
        """Return the cuts that climbing from the best of some cuts passes, the best first."""
        if not starts:
            return []
        search = self._search(clock)
        borders = np.array([borders for borders, _ in starts], dtype=np.int64).reshape(len(starts), -1)
        evaluated = search.evaluated(borders, np.array([order for _, order in starts], dtype=np.int64))
        return search.climb(evaluated[0]) if evaluated else []

    def _proportional_cuts(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return cuts into stages in proportion to the speeds of their devices, on a few orders of these."""
        cuts: list[tuple[Sequence[int], Sequence[int]]] = []
        for order in first_orders(self.cluster, self.devices):
            speeds = [self.cluster.devices[order[row]].speed for row in self._rows]
            allowed = self.costs.allowed_borders
            borders = proportional_borders(self.costs.compute_sums, allowed, speeds)
            borders = self.part.request.constraints.moved_to_pins(borders)
            if np.isin(borders, allowed).all() and (np.diff(borders) > 0).all():
                cuts.append((borders.tolist(), order))
        return cuts

    @property
    def _is_plain(self) -> bool:
        """True if each device has one stage, so that the dynamic program finds the smallest bottleneck."""
        return self.chunks == 1 and self.schedule not in BIDIRECTIONAL

    @cached_property
    def _is_limited(self) -> bool:
        return self.costs.may_exceed(self.part.groups.least_memory)

    @property
    def _rows(self) -> tuple[int, ...]:
        """The schedule row of each stage of the first copy of the model."""
        return self.bare_schedule.device_of[: self.stages]

    @property
    def _structure(self) -> tuple[str, int, int, int]:
        return self.schedule, self.devices, self.part.micro_batches, self.chunks

    @property
    def _links(self) -> list[Link]:
        """The kinds of links between two devices."""
        return [self.cluster.link, *self.cluster.links, *self.cluster.network]

    @property
    def _spaces(self) -> OrderSpaces:
        """The orders of the devices."""
        return self.part.once("spaces", lambda: order_spaces(self.cluster, self.costs.layers))

    def _problem(self, clock: Clock | None, *, limited: bool = True) -> ChainProblem:
        """The dynamic program, with or without the limits of memory."""
        counts, limits = self.cut_costs.counts, self.part.request.constraints
        return ChainProblem(
            self.costs, self.cluster, self.devices, counts, limits, clock, self._spaces, limited=limited
        )

    def order_of(self, cut: ChainCut) -> tuple[int, ...]:
        """Return the device of each schedule row, by its position in the cluster."""
        at = dict(zip(self._rows, cut.device_indices, strict=True))
        return tuple(at[row] for row in range(self.devices))

    def plan_of(self, borders: Sequence[int], order: Sequence[int], bound: float) -> Plan:
        """Return the plan of one cut, whether it fits or not.

        Args:
            borders: the first layer of each stage but the first.
            order: the device of each schedule row, by its position in the cluster.
            bound: no cut of this candidate has a smaller bottleneck.
        """
        request, groups, rows = self.part.request, self.part.groups, self._rows
        table = np.array([borders], dtype=np.int64).reshape(1, -1)
        modes = self.cut_costs.stage_modes(table, np.array([order]))
        names = [info.name for info in self.part.profile.layers]
        homes = [self.cluster.devices[order[row]].name for row in rows]
        stages = tuple(
            StagePlan(layers=tuple(names[first:end]), device=home).with_mode(mode)
            for (first, end), home, mode in zip(
                pairwise([0, *borders, len(names)]), homes, modes, strict=True
            )
        )
        if groups.replicas > 1 and not groups.identical:
            bound = 0.0  # other groupings of the devices were not tried
        if self._is_limited and request.mode_choices != (self.choice,):
            bound = 0.0  # with other modes that the request allows, other cuts fit
        draft = Plan.model_construct(
            stages=stages,
            cluster=groups.all_devices,
            schedule=self.schedule,
            micro_batches=self.costs.micro_batches,
            chunks=self.chunks,
            replica_devices=tuple(
                tuple(groups.members[home][replica] for home in homes)
                for replica in range(1, groups.replicas)
            ),
            fingerprint=request.profile.fingerprint,
            outputs=self.part.profile.outputs,
            profile=self.part.profile,
            constraints=request.asked,
        )
        return draft.predict(self.costs, bound)
