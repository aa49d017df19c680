"""One way to run a model, all but the cut: a schedule, a number of micro-batches, what may be made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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
from ..prediction import Piece, stage_plans
from ..stage_plan import Recompute

# The stages of each device under the schedules that plans are made for; with None the schedule has one.
CHUNKS: dict[str, int | None] = {
    "1f1b": None,
    "gpipe": None,
    "sequential": None,
    "eager-1f1b": None,
    "zb-h1": None,
    "zb-h2": None,
    "interleaved-1f1b": 2,
    "looped-bfs": 2,
    "interleaved-zb": 2,
    "hanayo": 2,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 2,
}
# Those that a plan is made for if they are asked for by name: what they train is not what plain training does.
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")


@dataclass(frozen=True)
class Candidate:
    """A candidate: makes the best plan for so many devices, or says why there is none.

    Attributes:
        profile: the layers.
        groups: the devices, shared out among the copies of the model.
        costs: of the layers at the number of micro-batches.
        schedule: its name.
        chunks: stages of each device.
        recompute: what stages may do.
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

    @property
    def cluster(self) -> Cluster:
        """The devices that a stage of one copy of the model may be on."""
        return self.groups.cluster

    @property
    def micro_batches(self) -> int:
        """Those that run through one copy of the model, at most."""
        return -(-self.costs.micro_batches // self.groups.replicas)

    def placement(self, devices: int) -> tuple[int, ...]:
        """The row of the schedule that each stage of one copy of the model is in."""
        return self._built(devices).device_of

    def impossible_reason(self, devices: int) -> str:
        """Why there is no such cut, whatever the memory; empty where that is not known."""
        stages = devices * self.chunks
        if self.chunks > 1 and devices == 1:
            return "several stages on one device alone gain nothing"
        if stages > self.costs.layers:
            return f"{stages} stages, and the model has {self.costs.layers} layers"
        if self.constraints.stages not in (None, stages):
            return f"{stages} stages, and cut_before makes {self.constraints.stages}"
        if any(stage >= stages for stage in self.constraints.pins.values()):
            return f"pin has a layer in stage {max(self.constraints.pins.values())}, and there are {stages} stages"
        if self.groups.replicas > self.costs.micro_batches:
            return (
                f"{counted(self.costs.micro_batches, 'micro-batch', 'es')} are fewer than the {self.groups.replicas} "
                "copies of the model"
            )
        if self.groups.replicas > 1 and self.schedule in ASYNCHRONOUS:
            return (
                "it is asynchronous: copies of the model would have to agree on their weights within a step"
            )
        try:
            self._built(devices)
        except schedules.ScheduleError as error:
            return str(error)
        return ""

    def best_plan(self, devices: int) -> Plan | None:
        """The plan whose bottleneck is smallest, None where none fits."""
        if self.impossible_reason(devices):
            return None
        problem = self._problem(devices)
        found = problem.best()
        if found is None or found.deficit_bytes:
            return None
        return self._plan(
            found.first_layers,
            found.device_indices,
            problem.modes(found.first_layers, found.device_indices),
            found.bound,
        )

    def plan_for_cut(
        self, first_layers: Sequence[int], device_indices: Sequence[int], devices: int, bound: float
    ) -> Plan | None:
        """The plan of one cut, None where it does not fit.

        Args:
            first_layers: first layer of each stage.
            device_indices: device of each, by its position in the cluster.
            devices: how many different ones.
            bound: what no cut of the candidate has a smaller bottleneck than.
        """
        made = self._plan(
            first_layers, device_indices, self._problem(devices).modes(first_layers, device_indices), bound
        )
        needs = zip(made.cluster.devices, made.predicted.memory_bytes, strict=True)
        fits = all(device.memory_bytes is None or need <= device.memory_bytes for device, need in needs)
        return made if fits else None

    def infeasible(self, devices: int) -> Infeasible:
        """Why no plan for so many devices fits, told by the cut that comes nearest."""
        reason = self.impossible_reason(devices)
        if reason:
            return Infeasible(
                f"schedule {self.schedule!r} on {counted(devices, 'device')}: {reason}", None, 0, 0
            )
        problem = self._problem(devices)
        found = problem.nearest()
        if found is None:
            return Infeasible(
                f"no cut into {counted(devices * self.chunks, 'stage')} is possible: layers that share parameters or "
                "buffers, or that are to stay together, are in one stage",
                None,
                0,
                0,
            )
        modes = problem.modes(found.first_layers, found.device_indices)
        return explain_infeasible(
            self._plan(found.first_layers, found.device_indices, modes, 0.0), proven=found.all_tried
        )

    def _problem(self, devices: int) -> ChainProblem | ChunkedProblem:
        """The search for so many devices, made once: it keeps what it has found of stages."""
        if devices not in self._problems:
            kept: dict[Recompute, StashCounts] = {
                mode: self._kept(devices, mode) for mode in MODES[self.recompute]
            }
            self._problems[devices] = (
                ChainProblem(self.costs, self.cluster, devices, kept, self.constraints.places(devices))
                if self.chunks == 1
                else ChunkedProblem(self.costs, self.cluster, self.placement(devices), kept, self.constraints)
            )
        return self._problems[devices]

    def _built(self, devices: int) -> schedules.Schedule:
        return _built(self.schedule, devices, self.micro_batches, self.chunks)

    def _kept(self, devices: int, mode: Recompute) -> StashCounts:
        return _kept(self.schedule, devices, self.micro_batches, self.chunks, mode)

    def _plan(
        self,
        first_layers: Sequence[int],
        device_indices: Sequence[int],
        modes: Sequence[Recompute],
        bound: float,
    ) -> Plan:
        ends = [*first_layers[1:], self.costs.layers]
        pieces = [
            Piece(slice(start, end), self.cluster.devices[site].name, mode)
            for start, end, site, mode in zip(first_layers, ends, device_indices, modes, strict=True)
        ]
        devices = len(set(device_indices))
        kept = [self._kept(devices, piece.recompute).by_stage[stage] for stage, piece in enumerate(pieces)]
        older = self._kept(devices, "never").older
        stages = stage_plans(self.profile, self.costs, self.groups.all_devices, pieces, kept, older)
        draft = Plan.model_construct(
            stages=stages,
            cluster=self.groups.all_devices,
            schedule=self.schedule,
            micro_batches=self.costs.micro_batches,
            chunks=self.chunks,
            replica_devices=tuple(
                tuple(self.groups.members[piece.device][copy] for piece in pieces)
                for copy in range(1, self.groups.replicas)
            ),
            fingerprint=self.profile.fingerprint,
            outputs=self.profile.outputs,
            profile=self.profile,
        )
        if self.groups.replicas > 1 and not self.groups.identical:
            bound = 0.0  # other groups of the devices were not looked at
        return draft.model_copy(update={"prediction": draft.predict(self.costs.total_seconds, bound)})


@lru_cache(maxsize=256)
def _built(name: str, devices: int, micro_batches: int, chunks: int) -> schedules.Schedule:
    return schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks)


@lru_cache(maxsize=256)
def _kept(name: str, devices: int, micro_batches: int, chunks: int, mode: Recompute) -> StashCounts:
    """What the stages keep if all of them do as the mode says; each keeps as much whatever the others do."""
    return StashCounts(with_recompute(_built(name, devices, micro_batches, chunks), [mode]))
