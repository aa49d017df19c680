"""Candidate: one way to run a model, without the cut: schedule, devices, stages, micro-batches, replicas, recompute."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import schedules

from ...cluster import Cluster
from ...profiling import Profile
from ...units import counted
from ..constraints import Constraints
from ..costs.cut_costs import CutCosts
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODE_SETS, Mode, ModeChoice, StashCounts
from ..infeasible import Infeasible, explain_infeasible
from ..partition.chain_dp import ChainCut, ChainProblem
from ..partition.interleaved import ChunkedProblem
from ..partition.reductions import runs_all_reduce
from ..partition.replica_groups import ReplicaGroups
from ..plans.options import PlanOptions
from ..plans.plan import Plan
from ..plans.stage_plan import StagePlan
from ..request import ASYNCHRONOUS, BIDIRECTIONAL, DEFERRING
from .step_times import StepTimes, has_bandwidth
from .structure import levels, named_schedule, stash_counts

_SIMULATED = 3000  # cuts times orders, up to which every one is simulated

# Cuts by what they depend on: candidates whose schedules place the stages alike share them.
FoundCuts = dict[Hashable, ChainCut | None]


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, without the cut: finds a cut, makes the plan of a cut, or tells why there is none.

    Attributes:
        profile: the layers, with costs at the number of micro-batches only.
        groups: the devices, grouped for the replicas of the model.
        costs: of the layers at the number of micro-batches.
        schedule: its name.
        chunks: stages of each device.
        devices: of one replica.
        choice: the modes that stages may use.
        modes: all modes that stages of the request may use, of which ``choice`` may have some.
        least_seconds: that no plan on so many devices can beat.
        speed: of the fastest devices that all replicas may use, summed.
        constraints: of the user, by layer index.
        asked: the keywords of the user, for the plan.
        fingerprint: of the profile.
        found: cuts of candidates with the same costs, groups and constraints.
    """

    profile: Profile
    groups: ReplicaGroups
    costs: ChainCosts
    schedule: str
    chunks: int
    devices: int
    choice: ModeChoice
    modes: tuple[Mode, ...]
    least_seconds: float
    speed: float
    constraints: Constraints
    asked: PlanOptions
    fingerprint: str
    found: FoundCuts = field(compare=False, repr=False)

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

    @cached_property
    def shortest_possible_step(self) -> float:
        """Seconds that no plan can beat."""
        costs, counts = self.costs, self.costs.micro_batches
        repeated = {"always": counts, "except-last": max(counts - self.groups.replicas, 0)}
        if self.choice not in repeated:
            return self.least_seconds
        saved = 0.0 if costs.split is None else -float(costs.split.clip(max=0.0).sum())
        again = repeated[self.choice] * float(costs.forward[costs.has_backward].sum())
        work = (costs.total_seconds - saved) * counts + again
        return max(self.least_seconds, work / self.speed)

    @property
    def likely_step(self) -> float:
        """A guess of its step, to try the best ones first: even stages, idle while the pipeline fills and drains."""
        waits = 1 / 3 if self.schedule in DEFERRING else 1.0
        return self.shortest_possible_step * (
            1 + waits * (self.devices - 1) / (self.micro_batches * self.chunks)
        )

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """Orders of the devices that differ, as far as every cut can be simulated on each."""
        return self.groups.orders(self.devices, _SIMULATED // max(self._cuts, 1) + 1)

    @property
    def tries_every_cut(self) -> bool:
        """True if there are so few cuts and orders of the devices that each is simulated."""
        if not 0 < self._cuts <= _SIMULATED:  # known without the orders, of which a large cluster has many
            return not self._cuts
        return self._cuts * len(self.orders) <= _SIMULATED

    @property
    def is_extra(self) -> bool:
        """True if the request leaves the recompute mode open, and this candidate has one mode for all stages."""
        return self.choice in ("never", "except-last", "always") and self.choice != self.asked.recompute

    @property
    def is_dominated(self) -> bool:
        """True if ``recompute="auto"`` makes no slower plans: every cut is tried, or no memory is short."""
        return self.tries_every_cut or (not self._is_limited and self.choice == "never")

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

    def smallest_bottleneck(self) -> ChainCut | None:
        """The cut with the smallest bottleneck; None if none fits, or none is possible."""
        if self.impossible_reason:
            return None
        key: Hashable = (self.devices, self.bare_schedule.device_of, self.cut_costs.modes)
        if self._is_limited:
            key = (key, self.schedule)  # whose order decides how much memory a cut needs
        if key not in self.found:
            best = self._problem.best()
            self.found[key] = None if best is None or best.deficit_bytes else best
        return self.found[key]

    def plan_for_cut(self, borders: Sequence[int], order: Sequence[int], bound: float) -> Plan | None:
        """The plan of one cut; None if it does not fit.

        Args:
            borders: the first layer of each stage but the first.
            order: the device of each schedule row, by its position in the cluster.
            bound: no cut of this candidate has a smaller bottleneck.
        """
        made = self._plan(borders, order, bound)
        return made if made.fits else None

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
        nearest = self._plan(found.first_layers[1:], self.order_of(found), 0.0)
        return explain_infeasible(nearest, found.deficit_bytes if found.exhaustive else None)

    @cached_property
    def bare_schedule(self) -> schedules.Schedule:
        """The schedule of one replica, without recomputes."""
        return named_schedule(*self._structure)

    @cached_property
    def cut_costs(self) -> CutCosts:
        """The costs of cuts. Stages do not affect each other's stash counts, so that each may have its own mode."""
        modes = MODE_SETS[self.choice][
            : None if self._is_limited else 1
        ]  # without a limit the fastest mode fits
        summed = 1 if runs_all_reduce(self.groups.all_devices) else self.groups.replicas
        counts: dict[Mode, StashCounts] = {
            mode: stash_counts(*self._structure, mode, summed) for mode in modes
        }
        bare = self.bare_schedule
        return CutCosts(self.costs, self.cluster, bare.device_of, counts, bare.replicas)

    @cached_property
    def step_times(self) -> StepTimes:
        """Simulates one step of one replica for many cuts at once."""
        own = levels(*self._structure, self.cut_costs.may_recompute, has_bandwidth(self.cluster))
        return StepTimes(self.costs, self.cut_costs, own)

    @property
    def _is_limited(self) -> bool:
        return self.costs.may_exceed(self.groups.least_memory)

    @property
    def has_cuts(self) -> bool:
        """True if enough borders are allowed for a cut into so many stages."""
        return self._cuts > 0

    @property
    def _cuts(self) -> int:
        return math.comb(len(self.costs.allowed_borders), self.stages - 1)

    @property
    def _rows(self) -> tuple[int, ...]:
        """The schedule row of each stage of the first copy of the model."""
        return self.bare_schedule.device_of[: self.stages]

    @property
    def _structure(self) -> tuple[str, int, int, int]:
        return self.schedule, self.devices, self.micro_batches, self.chunks

    @cached_property
    def _problem(self) -> ChainProblem | ChunkedProblem:
        if self.chunks == 1 and self.schedule not in BIDIRECTIONAL:
            counts = self.cut_costs.counts
            return ChainProblem(self.costs, self.cluster, self.devices, counts, self.constraints)
        return ChunkedProblem(self.costs, self.cluster, self.cut_costs, self.constraints)

    def order_of(self, found: ChainCut) -> tuple[int, ...]:
        """The device of each schedule row."""
        at = dict(zip(self._rows, found.device_indices, strict=True))
        return tuple(at[row] for row in range(self.devices))

    def _plan(self, borders: Sequence[int], order: Sequence[int], bound: float) -> Plan:
        rows = self._rows
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
