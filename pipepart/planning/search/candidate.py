"""Candidate: one way to run a model, without the cut: schedule, micro-batches, replicas and recompute modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

import schedules

from ...cluster import Cluster
from ...profiling import Profile
from ...units import counted
from ..costs.cut_costs import CutCosts
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODES, Recompute, StashCounts, with_recompute
from ..infeasible import Infeasible, explain_infeasible
from ..partition.chain_dp import ChainCut, ChainProblem
from ..partition.interleaved import ChunkedProblem
from ..partition.replica_groups import ReplicaGroups
from ..plan_document import Plan
from ..plan_record import PlanConstraints
from ..request import ASYNCHRONOUS, Constraints
from ..stage_plan import StagePlan


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, without the cut: finds the best plan for a number of devices, or why there is none.

    Attributes:
        profile: the layers, with costs at the number of micro-batches only.
        groups: the devices, grouped for the replicas of the model.
        costs: of the layers at the number of micro-batches.
        schedule: its name.
        chunks: stages of each device.
        constraints: of the user, by layer index.
        asked: the keywords of the user, for the plan; with the modes that stages may use.
        fingerprint: of the profile.
    """

    profile: Profile
    groups: ReplicaGroups
    costs: ChainCosts
    schedule: str
    chunks: int
    constraints: Constraints
    asked: PlanConstraints
    fingerprint: str
    _problems: dict[int, ChainProblem | ChunkedProblem] = field(default_factory=dict, repr=False)
    _bare: dict[int, schedules.Schedule] = field(default_factory=dict, repr=False)
    _cut_costs: dict[int, CutCosts] = field(default_factory=dict, repr=False)

    @property
    def cluster(self) -> Cluster:
        """The devices that a stage of one replica may be on."""
        return self.groups.cluster

    @property
    def micro_batches(self) -> int:
        """The most micro-batches of one replica."""
        return -(-self.costs.micro_batches // self.groups.replicas)

    def shortest_possible_step(self, devices: int) -> float:
        """Return seconds that no plan can beat: the devices share all work evenly and are never idle."""
        speeds = sorted((device.speed for device in self.groups.all_devices.devices), reverse=True)
        saved = 0.0 if self.costs.split is None else -np.minimum(self.costs.split, 0.0).sum()
        work = (self.costs.total_seconds - float(saved)) * self.costs.micro_batches
        return work / sum(speeds[: devices * self.groups.replicas])

    def impossible_reason(self, devices: int) -> str:
        """Why no such cut exists, however much memory there is; empty if that is not known."""
        stages = devices * self.chunks
        if self.chunks > 1 and devices == 1:
            return "several stages on a single device gain nothing"
        if stages > self.costs.layers:
            return f"{stages} stages, and the model has {self.costs.layers} layers"
        if self.constraints.stages not in (None, stages):
            return f"{stages} stages, and cut_before makes {self.constraints.stages}"
        if any(stage >= stages for stage in self.constraints.pins.values()):
            return f"pin has a layer in stage {max(self.constraints.pins.values())}, and there are {stages} stages"
        if self.groups.replicas > self.costs.micro_batches:
            return (
                f"{counted(self.costs.micro_batches, 'micro-batch', 'es')} cannot be shared by "
                f"{self.groups.replicas} replicas of the model"
            )
        if self.groups.replicas > 1 and self.schedule in ASYNCHRONOUS:
            return "it is asynchronous: replicas would have to agree on their weights within a step"
        try:
            self.bare_schedule(devices)
        except schedules.ScheduleError as error:
            return str(error)
        return ""

    def best_plan(self, devices: int) -> Plan | None:
        """The plan with the smallest bottleneck; None if none fits."""
        if self.impossible_reason(devices):
            return None
        found = self._problem(devices).best()
        if found is None or found.deficit_bytes:
            return None
        return self.plan_for_cut(found.first_layers[1:], self._order(found, devices), devices, found.bound)

    def plan_for_cut(
        self, borders: Sequence[int], order: Sequence[int], devices: int, bound: float
    ) -> Plan | None:
        """The plan of one cut; None if it does not fit.

        Args:
            borders: the first layer of each stage but the first.
            order: the device of each schedule row, by its position in the cluster.
            devices: their number.
            bound: no cut of this candidate has a smaller bottleneck.
        """
        made = self._plan(borders, order, devices, bound)
        needs = zip(made.cluster.devices, made.predicted.memory_bytes, strict=True)
        fits = all(device.memory_bytes is None or need <= device.memory_bytes for device, need in needs)
        return made if fits else None

    def infeasible(self, devices: int) -> Infeasible:
        """Why no plan for so many devices fits, explained with the cut that comes nearest."""
        reason = self.impossible_reason(devices)
        if reason:
            return Infeasible(f"schedule {self.schedule!r} on {counted(devices, 'device')}: {reason}")
        found = self._problem(devices).nearest()
        if found is None:
            return Infeasible(
                f"no cut into {counted(devices * self.chunks, 'stage')} is possible: layers that share parameters or "
                "buffers, or that colocate names, are in one stage"
            )
        nearest = self._plan(found.first_layers[1:], self._order(found, devices), devices, 0.0)
        return explain_infeasible(nearest, proven=found.exhaustive)

    def bare_schedule(self, devices: int) -> schedules.Schedule:
        """The schedule of one replica, without recomputes."""
        if devices not in self._bare:
            self._bare[devices] = schedules.build(
                self.schedule, devices=devices, micro_batches=self.micro_batches, chunks=self.chunks
            )
        return self._bare[devices]

    def cut_costs(self, devices: int) -> CutCosts:
        """The costs of cuts for so many devices."""
        if devices not in self._cut_costs:
            bare = self.bare_schedule(devices)
            # Stages do not affect each other's counts, so that each may have its own mode.
            counts: dict[Recompute, StashCounts] = {
                mode: StashCounts(with_recompute(bare, [mode])) for mode in MODES[self.asked.recompute]
            }
            self._cut_costs[devices] = CutCosts(self.costs, self.cluster, bare.device_of, counts)
        return self._cut_costs[devices]

    def _problem(self, devices: int) -> ChainProblem | ChunkedProblem:
        """The search for so many devices, which keeps what it has computed about stages."""
        if devices not in self._problems:
            cuts = self.cut_costs(devices)
            self._problems[devices] = (
                ChainProblem(self.costs, self.cluster, devices, cuts.counts, self.constraints)
                if self.chunks == 1
                else ChunkedProblem(self.costs, self.cluster, cuts, self.constraints)
            )
        return self._problems[devices]

    def _order(self, found: ChainCut, devices: int) -> tuple[int, ...]:
        """The device of each schedule row."""
        at = dict(zip(self.bare_schedule(devices).device_of, found.device_indices, strict=True))
        return tuple(at[row] for row in range(devices))

    def _plan(self, borders: Sequence[int], order: Sequence[int], devices: int, bound: float) -> Plan:
        rows = self.bare_schedule(devices).device_of
        modes = self.cut_costs(devices).stage_modes(borders, order)
        names = [info.name for info in self.profile.layers]
        homes = [self.cluster.devices[order[row]].name for row in rows]
        stages = tuple(
            StagePlan(layers=tuple(names[first:end]), device=home, recompute=mode)
            for (first, end), home, mode in zip(
                pairwise([0, *borders, len(names)]), homes, modes, strict=True
            )
        )
        if self.groups.replicas > 1 and not self.groups.identical:
            bound = 0.0  # other groupings of the devices were not tried
        draft = Plan.model_construct(
            stages=stages,
            cluster=self.groups.all_devices,
            schedule=self.schedule,
            micro_batches=self.costs.micro_batches,
            chunks=self.chunks,
            replica_devices=tuple(
                tuple(self.groups.members[home][replica] for home in homes)
                for replica in range(1, self.groups.replicas)
            ),
            fingerprint=self.fingerprint,
            outputs=self.profile.outputs,
            profile=self.profile,
            constraints=self.asked,
        )
        return draft.predict(self.costs, bound)
