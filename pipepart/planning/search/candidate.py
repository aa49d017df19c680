"""Candidate: one way to run a model, without the cut: schedule, micro-batches, replicas and recompute modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import schedules

from ...cluster import Cluster
from ...profiling import Profile
from ...units import counted
from ..constraints import Constraints
from ..costs.cut_costs import CutCosts
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODE_SETS, Mode, ModeChoice, StashCounts, with_modes
from ..costs.step_bound import step_bound
from ..infeasible import Infeasible, explain_infeasible
from ..partition.chain_dp import ChainCut, ChainProblem
from ..partition.interleaved import ChunkedProblem
from ..partition.replica_groups import ReplicaGroups
from ..plan_document import Plan
from ..plan_record import PlanConstraints
from ..request import ASYNCHRONOUS
from ..stage_plan import StagePlan


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, without the cut: finds the best plan, or why there is none.

    Attributes:
        profile: the layers, with costs at the number of micro-batches only.
        groups: the devices, grouped for the replicas of the model.
        costs: of the layers at the number of micro-batches.
        schedule: its name.
        chunks: stages of each device.
        devices: of one replica.
        choice: the modes that stages may use.
        modes: all modes that stages of the request may use, of which ``choice`` may have some.
        constraints: of the user, by layer index.
        asked: the keywords of the user, for the plan.
        fingerprint: of the profile.
    """

    profile: Profile
    groups: ReplicaGroups
    costs: ChainCosts
    schedule: str
    chunks: int
    devices: int
    choice: ModeChoice
    modes: tuple[Mode, ...]
    constraints: Constraints
    asked: PlanConstraints
    fingerprint: str

    @property
    def cluster(self) -> Cluster:
        """The devices that a stage of one replica may be on."""
        return self.groups.cluster

    @property
    def micro_batches(self) -> int:
        """The most micro-batches of one replica."""
        return -(-self.costs.micro_batches // self.groups.replicas)

    @property
    def stages(self) -> int:
        """Stages of one replica."""
        return self.devices * self.chunks

    @property
    def shortest_possible_step(self) -> float:
        """Seconds that no plan on as many devices can beat."""
        speeds = sorted((device.speed for device in self.groups.all_devices.devices), reverse=True)
        measured = self.profile.at(self.costs.micro_batches)
        return step_bound(measured, speeds[: self.devices * self.groups.replicas], self.groups.replicas)

    @cached_property
    def impossible_reason(self) -> str:
        """Why no such cut exists, however much memory there is; empty if that is not known."""
        stages = self.stages
        if self.chunks > 1 and self.devices == 1:
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
            _ = self.bare_schedule
        except schedules.ScheduleError as error:
            return str(error)
        return ""

    def best_plan(self) -> Plan | None:
        """The plan with the smallest bottleneck; None if none fits."""
        if self.impossible_reason:
            return None
        found = self._problem.best()
        if found is None or found.deficit_bytes:
            return None
        return self.plan_for_cut(found.first_layers[1:], self._order(found), found.bound)

    def plan_for_cut(self, borders: Sequence[int], order: Sequence[int], bound: float) -> Plan | None:
        """The plan of one cut; None if it does not fit.

        Args:
            borders: the first layer of each stage but the first.
            order: the device of each schedule row, by its position in the cluster.
            bound: no cut of this candidate has a smaller bottleneck.
        """
        made = self._plan(borders, order, bound)
        needs = zip(made.cluster.devices, made.predicted.memory_bytes, strict=True)
        fits = all(device.memory_bytes is None or need <= device.memory_bytes for device, need in needs)
        return made if fits else None

    def infeasible(self) -> Infeasible:
        """Why no plan fits, explained with the cut that comes nearest."""
        if self.impossible_reason:
            where = f"schedule {self.schedule!r} on {counted(self.devices, 'device')}"
            return Infeasible(f"{where}: {self.impossible_reason}")
        found = self._problem.nearest()
        if found is None:
            return Infeasible(
                f"no cut into {counted(self.stages, 'stage')} is possible: layers that share parameters or buffers, or "
                "that colocate names, are in one stage"
            )
        nearest = self._plan(found.first_layers[1:], self._order(found), 0.0)
        return explain_infeasible(nearest, proven=found.exhaustive)

    @cached_property
    def bare_schedule(self) -> schedules.Schedule:
        """The schedule of one replica, without recomputes."""
        return schedules.build(
            self.schedule, devices=self.devices, micro_batches=self.micro_batches, chunks=self.chunks
        )

    @cached_property
    def cut_costs(self) -> CutCosts:
        """The costs of cuts. Stages do not affect each other's stash counts, so that each may have its own mode."""
        counts: dict[Mode, StashCounts] = {
            mode: StashCounts(with_modes(self.bare_schedule, [mode])) for mode in MODE_SETS[self.choice]
        }
        return CutCosts(self.costs, self.cluster, self.bare_schedule.device_of, counts)

    @cached_property
    def _problem(self) -> ChainProblem | ChunkedProblem:
        if self.chunks == 1:
            counts = self.cut_costs.counts
            return ChainProblem(self.costs, self.cluster, self.devices, counts, self.constraints)
        return ChunkedProblem(self.costs, self.cluster, self.cut_costs, self.constraints)

    def _order(self, found: ChainCut) -> tuple[int, ...]:
        """The device of each schedule row."""
        at = dict(zip(self.bare_schedule.device_of, found.device_indices, strict=True))
        return tuple(at[row] for row in range(self.devices))

    def _plan(self, borders: Sequence[int], order: Sequence[int], bound: float) -> Plan:
        rows = self.bare_schedule.device_of
        modes = self.cut_costs.stage_modes(borders, order)
        names = [info.name for info in self.profile.layers]
        homes = [self.cluster.devices[order[row]].name for row in rows]
        stages = tuple(
            StagePlan(layers=tuple(names[first:end]), device=home).with_mode(mode)
            for (first, end), home, mode in zip(
                pairwise([0, *borders, len(names)]), homes, modes, strict=True
            )
        )
        if self.groups.replicas > 1 and not self.groups.identical:
            bound = 0.0  # other groupings of the devices were not tried
        if "offload" in self.modes and any(mode != "never" for mode in modes):
            bound = 0.0  # other mixtures of recompute and offload were not tried
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
