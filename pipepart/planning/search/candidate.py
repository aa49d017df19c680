"""Candidate: one way to run a model, without the cut: schedule, devices, stages a device, recompute modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

import schedules

from ...cluster import Cluster
from ...units import counted
from ..costs.crossings import Borders
from ..costs.cut_costs import CutCosts
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODE_SETS, Floats, Ints, Mode, ModeChoice, StashCounts, with_modes
from ..partition.local_search import EvaluatedCut
from ..partition.reductions import runs_all_reduce
from ..plans.plan import Plan
from ..plans.stage_plan import StagePlan
from ..request import ASYNCHRONOUS, BIDIRECTIONAL, DEFERRING
from .parts import Part
from .step_times import Levels, StepTimes, has_bandwidth

# Seconds to build, evaluate and simulate a candidate, for each of its stages and micro-batches. Only what is too large
# for the clock is left out for it.
_SECONDS_EACH = 70e-6
_SECONDS_EACH_CHUNKED = 130e-6  # of schedules with several stages a device
_SECONDS_EACH_STAGE = 2e-3
_SECONDS_EACH_RANGE = 50e-6  # of the cut with the smallest bottleneck, for each layer and stage
_SECONDS_EACH_SEARCHED = 500e-6  # of schedules that are found by a search of their own
_SEARCHED = ("v-half", "v-min")
_LIMITED = 3.0  # times as long where memory has limits: each recompute mode has moments of its own


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, without the cut: evaluates cuts, and makes the plan of one.

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
        of_stage = _SECONDS_EACH_STAGE + _SECONDS_EACH_RANGE * self.costs.layers
        seconds = self.size * each + self.stages * of_stage
        return seconds * _LIMITED if self.is_limited else seconds

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

    @cached_property
    def bare_schedule(self) -> schedules.Schedule:
        """The schedule of one replica, without recomputes."""
        name, devices, micro_batches, chunks = self.structure
        return self.part.once(
            ("schedule", self.structure),
            lambda: schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks),
        )

    @cached_property
    def cut_costs(self) -> CutCosts:
        """The memory and modes of cuts. Each stage may have its own mode: it does not affect the counts of others."""
        # Without a limit the fastest mode fits.
        modes = MODE_SETS[self.choice][: None if self.is_limited else 1]
        groups, bare = self.part.groups, self.bare_schedule
        summed = (1 if runs_all_reduce(groups.all_devices) else groups.replicas) * bare.replicas
        counts: dict[Mode, StashCounts] = {
            mode: self.part.once(
                ("counts", self.structure, mode),
                lambda mode=mode: StashCounts(with_modes(bare, [mode]), replicas=summed),
            )
            for mode in modes
        }
        return CutCosts(self.costs, self.cluster, bare.device_of, counts, bare.replicas)

    @cached_property
    def step_times(self) -> StepTimes:
        """Simulates one step of one replica for many cuts at once."""
        key = "levels", self.structure, self.cut_costs.may_recompute
        recompute, on_links = self.cut_costs.may_recompute, has_bandwidth(self.cluster)
        levels = self.part.once(key, lambda: Levels(self.bare_schedule, recompute, on_links))
        return StepTimes(self.cut_costs, levels)

    @property
    def is_plain(self) -> bool:
        """True if each device has one stage, so that the dynamic program finds the smallest bottleneck."""
        return self.chunks == 1 and self.schedule not in BIDIRECTIONAL

    @cached_property
    def is_limited(self) -> bool:
        """True if a plan may need more memory than a device has."""
        return self.costs.may_exceed(self.part.groups.least_memory)

    @property
    def rows(self) -> tuple[int, ...]:
        """The schedule row of each stage of the first copy of the model."""
        return self.bare_schedule.device_of[: self.stages]

    @property
    def structure(self) -> tuple[str, int, int, int]:
        """What its schedule is built from: name, devices, micro-batches, stages a device."""
        return self.schedule, self.devices, self.part.micro_batches, self.chunks

    def plan_of(self, borders: Sequence[int], order: Sequence[int], bound: float) -> Plan:
        """Return the plan of one cut, whether it fits or not.

        Args:
            borders: the first layer of each stage but the first.
            order: the device of each schedule row, by its position in the cluster.
            bound: no cut of this candidate has a smaller bottleneck.
        """
        request, groups, rows = self.part.request, self.part.groups, self.rows
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
        if self.is_limited and request.mode_choices != (self.choice,):
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
