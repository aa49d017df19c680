"""Splits a request into parts, each with a fixed number of micro-batches and of replicas, that are searched apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ...profiling import Profile
from ..costs.layer_ranges import ChainCosts
from ..costs.step_bound import step_bound
from ..joint.request import JointRequest
from ..partition.replica_groups import ReplicaGroups, groupings
from ..request import ASYNCHRONOUS, BIDIRECTIONAL, Request

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Part:
    """The part of a request with a fixed number of micro-batches and of replicas.

    Attributes:
        request: the whole request.
        profile: the layers, with costs at this number of micro-batches only.
        groups: the devices, grouped for the replicas.
        costs: the costs of the layers with tied layers in one stage; then, if they may be in different stages, the
            costs with that allowed.
    """

    request: Request
    profile: Profile
    groups: ReplicaGroups
    costs: tuple[ChainCosts, ...]
    _results: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def micro_batches(self) -> int:
        """The most micro-batches of one replica."""
        return -(-self.costs[0].micro_batches // self.groups.replicas)

    @property
    def most_devices(self) -> int:
        """The largest number of devices of one replica."""
        return min(len(self.groups.cluster), len(self.profile.layers))

    @property
    def shortest_possible_step(self) -> float:
        """A lower bound in seconds of the step of every plan of this part."""
        return self.least_seconds(self.most_devices)

    def least_seconds(self, devices: int) -> float:
        """Return a lower bound in seconds of the step of plans with this many devices per replica."""
        cluster, replicas = self.request.cluster, self.groups.replicas
        copies = replicas * (2 if self.request.schedule in BIDIRECTIONAL else 1)
        action = min(device.action_seconds for device in cluster.devices)
        speeds = self._speeds[: devices * replicas]
        return self.once(
            ("least seconds", devices),
            lambda: step_bound(self.profile.costs[0], speeds, copies, action_seconds=action),
        )

    def fastest_speed(self, devices: int) -> float:
        """Return the sum of the speeds of the fastest devices, this many per replica."""
        return sum(self._speeds[: devices * self.groups.replicas])

    @cached_property
    def _speeds(self) -> list[float]:
        return sorted((device.speed for device in self.request.cluster.devices), reverse=True)

    def once(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return the result of ``make()``, computed once for each key: candidates share schedules, cuts and bounds."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]

    def joint(self, costs: ChainCosts) -> JointRequest:
        """Return the request of the joint search, with these costs of the layers."""
        stages = self.request.stages
        return JointRequest(
            profile=self.profile,
            groups=self.groups,
            costs=costs,
            constraints=self.request.constraints,
            asked=self.request.asked,
            stages=None if stages == "auto" else stages,
            chunks=self.request.chunks,
        )


def parts_of(request: Request) -> Iterator[Part]:
    """Yield the parts of a request."""
    tied = any(info.shares_with for info in request.profile.layers)
    may_split = request.asked.allow_split_ties and request.schedule not in ASYNCHRONOUS
    limits = request.constraints
    all_groups = [groups for replicas in request.replicas for groups in groupings(request.cluster, replicas)]
    for count in request.micro_batches:
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
        for groups in all_groups:
            yield Part(request, profile, groups, costs)
