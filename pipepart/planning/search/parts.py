"""Splits a request into parts, each with a fixed number of micro-batches and of replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...profiling import Profile
from ..costs.layer_ranges import ChainCosts
from ..costs.step_bound import step_bound
from ..joint.request import JointRequest
from ..partition.replica_groups import ReplicaGroups, groupings
from ..request import ASYNCHRONOUS, BIDIRECTIONAL, Request

_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a request with a fixed number of micro-batches, a number of replicas and a grouping of the devices.

    Attributes:
        request: the whole request.
        profile: the layers, with costs at this number of micro-batches only.
        groups: the devices, grouped for the replicas.
        together: the costs of the layers with tied layers in one stage.
        split: the costs with tied layers in any stages; None if the request does not allow that.
    """

    request: Request
    profile: Profile
    groups: ReplicaGroups
    together: ChainCosts
    split: ChainCosts | None
    _results: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def micro_batches(self) -> int:
        """The most micro-batches of one replica."""
        return -(-self.together.micro_batches // self.groups.replicas)

    @property
    def most_devices(self) -> int:
        """The largest number of devices of one replica."""
        return min(len(self.groups.cluster), len(self.profile.layers))

    @property
    def most_together(self) -> int:
        """The largest number of stages of a cut with tied layers in one stage."""
        return len(self.together.allowed_borders) + 1

    @property
    def holds_weights(self) -> bool:
        """True if the devices of a replica together hold the parameters, gradients, optimizer state and buffers."""
        limits = [device.memory_bytes for device in self.groups.cluster.devices]
        needed = float(self.together.sizes(slice(0, self.together.layers)).static[0, 0])
        return needed <= sum(math.inf if limit is None else limit for limit in limits)

    def costs(self, stages: int) -> ChainCosts:
        """Return the costs for cuts into this many stages. Tied layers are split only if no such cut keeps them."""
        return self.together if self.split is None or self.most_together >= stages else self.split

    def least_seconds(self, devices: int) -> float:
        """Return a lower bound in seconds of the step of plans with this many devices per replica."""
        cluster, replicas = self.request.cluster, self.groups.replicas
        copies = replicas * (2 if self.request.schedule in BIDIRECTIONAL else 1)
        speeds = sorted((device.speed for device in cluster.devices), reverse=True)[: devices * replicas]
        action = min(device.action_seconds for device in cluster.devices)

        def bound() -> float:
            seconds = step_bound(self.profile.costs[0], speeds, copies, action_seconds=action)
            return seconds + cluster.step_seconds

        return self.once(("least seconds", devices), bound)

    def once(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return the result of ``make()``, computed once for each key: candidates share schedules, cuts and bounds."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]

    def joint(self) -> JointRequest:
        """Return the request of the joint search."""
        stages = self.request.stages
        return JointRequest(
            profile=self.profile,
            groups=self.groups,
            costs=self.costs(self.most_devices),
            constraints=self.request.constraints,
            asked=self.request.asked,
            stages=None if stages == "auto" else stages,
            chunks=self.request.chunks,
        )


def parts_of(request: Request) -> Iterator[Part]:
    """Yield the parts of a request."""
    tied = any(info.shares_with for info in request.profile.layers)
    may_split = tied and request.asked.allow_split_ties and request.schedule not in ASYNCHRONOUS
    all_groups = [groups for replicas in request.replicas for groups in groupings(request.cluster, replicas)]
    for count in request.micro_batches:
        measured = request.profile.at(count)
        profile = request.profile.model_copy(update={"costs": (measured,)})

        def costs(allow_split_ties: bool, profile: Profile = profile) -> ChainCosts:
            return ChainCosts(
                profile,
                profile.costs[0],
                request.constraints.colocate,
                request.constraints.no_border,
                allow_split_ties,
                request.gathers_outputs,
            )

        together, split = costs(False), costs(True) if may_split else None
        for groups in all_groups:
            yield Part(request, profile, groups, together, split)
