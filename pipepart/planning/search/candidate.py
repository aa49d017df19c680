"""Candidate: one way to run a model, without the cut: schedule, micro-batches, replicas and recompute modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import schedules

from ...cluster import Cluster
from ...profiling import Profile
from ...units import counted
from ..constraints import Constraints
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODES, RecomputeChoice, StashCounts, with_recompute
from ..feasibility.infeasible import Infeasible, explain_infeasible
from ..partition.chain_dp import ChainProblem
from ..partition.interleaved import ChunkedProblem
from ..partition.replica_groups import ReplicaGroups
from ..plan_document import Plan
from ..plan_record import ScheduleCache
from ..prediction import Piece, stage_plans
from ..request import ASYNCHRONOUS
from ..stage_plan import Recompute


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, without the cut: finds the best plan for a number of devices, or why there is none.

    Attributes:
        profile: the layers.
        groups: the devices, grouped for the replicas of the model.
        costs: of the layers at the number of micro-batches.
        schedule: its name.
        chunks: stages of each device.
        recompute: the modes that stages may use.
        constraints: of the user.
    """

    profile: Profile
    groups: ReplicaGroups
    costs: ChainCosts
    schedule: str
    chunks: int
    recompute: RecomputeChoice
    constraints: Constraints
    _problems: dict[int, ChainProblem | ChunkedProblem] = field(
        default_factory=dict, repr=False, compare=False
    )
    _bare: dict[int, schedules.Schedule] = field(default_factory=dict, repr=False, compare=False)
    _counts: dict[tuple[int, Recompute], StashCounts] = field(default_factory=dict, repr=False, compare=False)
    _built: ScheduleCache = field(default_factory=ScheduleCache, repr=False, compare=False)

    @property
    def cluster(self) -> Cluster:
        """The devices that a stage of one replica may be on."""
        return self.groups.cluster

    @property
    def micro_batches(self) -> int:
        """The most micro-batches of one replica."""
        return -(-self.costs.micro_batches // self.groups.replicas)

    def placement(self, devices: int) -> tuple[int, ...]:
        """The schedule row of each stage of one replica."""
        return self._schedule(devices).device_of

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
            self._schedule(devices)
        except schedules.ScheduleError as error:
            return str(error)
        return ""

    def best_plan(self, devices: int) -> Plan | None:
        """The plan with the smallest bottleneck; None if none fits."""
        if self.impossible_reason(devices):
            return None
        problem = self._problem(devices)
        found = problem.best()
        if found is None or found.deficit_bytes:
            return None
        return self.plan_for_cut(found.first_layers, found.device_indices, devices, found.bound)

    def plan_for_cut(
        self, first_layers: Sequence[int], device_indices: Sequence[int], devices: int, bound: float
    ) -> Plan | None:
        """The plan of one cut; None if it does not fit.

        Args:
            first_layers: the first layer of each stage.
            device_indices: the device of each stage, by its position in the cluster.
            devices: the number of different ones.
            bound: no cut of this candidate has a smaller bottleneck.
        """
        modes = self._problem(devices).modes(first_layers, device_indices)
        made = self._plan(first_layers, device_indices, modes, bound)
        needs = zip(made.cluster.devices, made.predicted.memory_bytes, strict=True)
        fits = all(device.memory_bytes is None or need <= device.memory_bytes for device, need in needs)
        return made if fits else None

    def infeasible(self, devices: int) -> Infeasible:
        """Why no plan for so many devices fits, explained with the cut that comes nearest."""
        reason = self.impossible_reason(devices)
        if reason:
            return Infeasible(f"schedule {self.schedule!r} on {counted(devices, 'device')}: {reason}")
        problem = self._problem(devices)
        found = problem.nearest()
        if found is None:
            return Infeasible(
                f"no cut into {counted(devices * self.chunks, 'stage')} is possible: layers that share parameters or "
                "buffers, or that colocate names, are in one stage"
            )
        modes = problem.modes(found.first_layers, found.device_indices)
        nearest = self._plan(found.first_layers, found.device_indices, modes, 0.0)
        return explain_infeasible(nearest, proven=found.exhaustive)

    def _problem(self, devices: int) -> ChainProblem | ChunkedProblem:
        """The search for so many devices, which keeps what it has computed about stages."""
        if devices not in self._problems:
            counts: dict[Recompute, StashCounts] = {
                mode: self._stash_counts(devices, mode) for mode in MODES[self.recompute]
            }
            self._problems[devices] = (
                ChainProblem(self.costs, self.cluster, devices, counts, self.constraints)
                if self.chunks == 1
                else ChunkedProblem(
                    self.costs, self.cluster, self.placement(devices), counts, self.constraints
                )
            )
        return self._problems[devices]

    def _schedule(self, devices: int) -> schedules.Schedule:
        if devices not in self._bare:
            self._bare[devices] = schedules.build(
                self.schedule, devices=devices, micro_batches=self.micro_batches, chunks=self.chunks
            )
        return self._bare[devices]

    def _stash_counts(self, devices: int, mode: Recompute) -> StashCounts:
        """The stash counts if all stages use the mode. Stages do not affect each other's counts."""
        key = devices, mode
        if key not in self._counts:
            self._counts[key] = StashCounts(with_recompute(self._schedule(devices), [mode]))
        return self._counts[key]

    def _plan(
        self,
        first_layers: Sequence[int],
        device_indices: Sequence[int],
        modes: Sequence[Recompute],
        bound: float,
    ) -> Plan:
        ends = [*first_layers[1:], self.costs.layers]
        pieces = [
            Piece(slice(start, end), self.cluster.devices[index].name, mode)
            for start, end, index, mode in zip(first_layers, ends, device_indices, modes, strict=True)
        ]
        devices = len(set(device_indices))
        counts = [self._stash_counts(devices, mode).by_stage[stage] for stage, mode in enumerate(modes)]
        older = self._stash_counts(devices, modes[0]).older  # the same in every mode
        stages = stage_plans(self.profile, self.costs, self.groups.all_devices, pieces, counts, older)
        draft = Plan.model_construct(
            stages=stages,
            cluster=self.groups.all_devices,
            schedule=self.schedule,
            micro_batches=self.costs.micro_batches,
            chunks=self.chunks,
            replica_devices=tuple(
                tuple(self.groups.members[piece.device][replica] for piece in pieces)
                for replica in range(1, self.groups.replicas)
            ),
            fingerprint=self.profile.fingerprint,
            outputs=self.profile.outputs,
            profile=self.profile,
        )
        draft._schedules = self._built
        if self.groups.replicas > 1 and not self.groups.identical:
            bound = 0.0  # other groupings of the devices were not tried
        return draft.model_copy(update={"prediction": draft.predict(self.costs.total_seconds, bound)})
