"""Splits a request into parts that are searched apart: one number of micro-batches and one of replicas each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ...profiling import Profile
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODES, ModeChoice
from ..costs.step_bound import step_bound
from ..joint.request import JointRequest
from ..partition.replica_groups import ReplicaGroups, groupings
from ..request import ASYNCHRONOUS, BIDIRECTIONAL, Request
from ..stage_modes import modes_of
from .candidate import Candidate, FoundCuts
from .named import Ways


@dataclass(frozen=True)
class Part:
    """What a request may choose from at one number of micro-batches and one of replicas.

    Attributes:
        request: of all parts.
        profile: the layers, with costs at the number of micro-batches only.
        groups: the devices, grouped for the replicas.
        costs: of the layers; if layers that share a parameter may be in different stages, those with that are last.
    """

    request: Request
    profile: Profile
    groups: ReplicaGroups
    costs: tuple[ChainCosts, ...]

    @cached_property
    def candidates(self) -> tuple[Ways, ...]:
        """Every named schedule, number of devices and of stages, the simplest first."""
        request = self.request
        found: list[Ways] = []
        most = min(len(self.groups.cluster), len(self.profile.layers))
        cuts: list[FoundCuts] = [{} for _ in self.costs]
        speeds = sorted((device.speed for device in request.cluster.devices), reverse=True)
        action = min(device.action_seconds for device in request.cluster.devices)
        choices, modes = request.mode_choices, self._modes
        allowed = modes_of(choices)
        replicas, fingerprint = self.groups.replicas, request.profile.fingerprint
        copies = replicas * (2 if request.schedule in BIDIRECTIONAL else 1)
        least = [
            step_bound(self.profile.costs[0], speeds[: devices * replicas], copies, action_seconds=action)
            for devices in range(1, most + 1)
        ]
        fastest = [sum(speeds[: devices * replicas]) for devices in range(1, most + 1)]
        for name, devices in product(request.schedules, range(most, 0, -1)):
            for chunks, mode in product(request.chunks_of(name, devices), modes):
                if request.stages not in ("auto", devices * chunks):
                    continue
                ways = tuple(
                    Candidate(
                        profile=self.profile,
                        groups=self.groups,
                        costs=costs,
                        schedule=name,
                        chunks=chunks,
                        devices=devices,
                        choice=mode,
                        modes=allowed,
                        least_seconds=least[devices - 1],
                        speed=fastest[devices - 1],
                        constraints=request.constraints,
                        asked=request.asked,
                        fingerprint=fingerprint,
                        found=own,
                    )
                    for costs, own in zip(self.costs, cuts, strict=True)
                )
                if mode in choices or not ways[0].is_dominated:
                    found.append(ways)
        return tuple(found)

    @property
    def shortest_possible_step(self) -> float:
        """Seconds that no plan of this part can beat."""
        return min((at_least for _, at_least in self.bounds), default=0.0)

    @property
    def bounds(self) -> list[tuple[Ways, float]]:
        """The candidates, each with seconds that it cannot beat."""
        return [(ways, ways[0].shortest_possible_step) for ways in self.candidates]

    @property
    def joint(self) -> JointRequest:
        """The request of the joint search."""
        stages = self.request.stages
        return JointRequest(
            profile=self.profile,
            groups=self.groups,
            costs=self.costs[-1],
            constraints=self.request.constraints,
            asked=self.request.asked,
            fingerprint=self.request.profile.fingerprint,
            stages=None if stages == "auto" else stages,
            chunks=self.request.chunks,
        )

    @property
    def _modes(self) -> tuple[ModeChoice, ...]:
        """The choices of the request, then each mode for all stages: a search from there may end elsewhere."""
        own = self.request.mode_choices
        return (*own, *(mode for mode in MODES[self.request.asked.recompute] if mode not in own))


def parts_of(request: Request) -> Iterator[Part]:
    """Yield the parts of a request."""
    tied = any(info.shares_with for info in request.profile.layers)
    may_split = request.asked.allow_split_ties and request.schedule not in ASYNCHRONOUS
    limits = request.constraints
    ways_to_group = [way for replicas in request.replicas for way in groupings(request.cluster, replicas)]
    for count, groups in product(request.micro_batches, ways_to_group):
        measured = request.profile.at(count)
        profile = request.profile.model_copy(update={"costs": (measured,)})
        costs = tuple(
            ChainCosts(
                profile,
                measured,
                limits.colocate,
                limits.no_border,
                split,
                request.gathers_outputs,
                may_relay=request.cluster.links_differ,
            )
            for split in ([False, True] if tied and may_split else [False])
        )
        yield Part(request, profile, groups, costs)
