"""Splits a request into parts, each with a fixed number of micro-batches and of replicas."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import Any, TypeVar

from ...profiling import Overhead, Profile
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODE_SETS, Mode
from ..costs.step_bound import step_bound
from ..overhead import most_on_a_host, with_overhead
from ..partition.order_search import OrderSpaces
from ..partition.reductions import runs_collectives
from ..partition.replica_groups import ReplicaGroups, fastest_devices, groupings
from ..plans.plan import Plan
from ..plans.stage_plan import StagePlan
from ..request import BIDIRECTIONAL, Request

_Result = TypeVar("_Result")

FEW_DEVICES = 4  # up to this many devices, try each number


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a request with a fixed number of micro-batches, a number of replicas and a grouping of the devices.

    Attributes:
        request: the whole request.
        profile: the layers, with costs at this number of micro-batches only.
        groups: the devices, grouped for the replicas.
        spaces: the orders of the devices to search.
        costs: the costs of the layers.
        computing: number of devices of ``groups``, with layers as slow as beside so many; None for all devices.
    """

    request: Request
    profile: Profile
    groups: ReplicaGroups
    spaces: OrderSpaces
    costs: ChainCosts
    computing: int | None = None
    _results: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def micro_batches(self) -> int:
        """The most micro-batches of one replica."""
        return -(-self.costs.micro_batches // self.groups.replicas)

    @property
    def most_devices(self) -> int:
        """The largest number of devices of one replica."""
        return min(len(self.groups.cluster), len(self.profile.layers))

    @property
    def least_devices(self) -> int:
        """The smallest number of devices of one replica: others have parts with the layers as fast as beside them."""
        if self.computing is not None:
            return self.computing
        return 1 + _most_computing(self.request) if self.groups.identical and self.groups.replicas == 1 else 1

    @property
    def scale(self) -> tuple[float, ...]:
        """Seconds of each micro-batch of a replica relative to the mean; empty for equal ones, and with replicas."""
        return self.costs.scale if self.groups.replicas == 1 else ()

    @property
    def summed_replicas(self) -> int:
        """The number of replicas whose gradients meet on the devices of the first; 1 if they are all-reduced."""
        together = runs_collectives(self.groups.all_devices, self.costs.shards > 1)
        return 1 if together else self.groups.replicas

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that stages may use, fastest first."""
        return tuple(
            dict.fromkeys(mode for choice in self.request.mode_choices for mode in MODE_SETS[choice])
        )

    @property
    def fixed_stages(self) -> int | None:
        """The number of stages that the request demands; None for any."""
        return None if self.request.stages == "auto" else self.request.stages

    @cached_property
    def is_limited(self) -> bool:
        """True if a plan may need more memory than a device has."""
        return self.costs.may_exceed(min(device.memory for device in self.groups.cluster.devices))

    @property
    def holds_weights(self) -> bool:
        """True if the devices hold the parameters, gradients, optimizer state and buffers of each layer, and of all."""
        room = [device.memory for device in self.groups.cluster.devices]
        layers = self.costs.static_of_layers
        whole = self.costs.sizes(slice(0, self.costs.layers)).static
        return bool(layers.max() <= max(room) and whole[0, 0] <= sum(room))

    def least_seconds(self, devices: int) -> float:
        """Return a lower bound in seconds of the step of plans with this many devices per replica."""

        def bound() -> float:
            cluster, replicas = self.request.cluster, self.groups.replicas
            copies = replicas * (2 if self.request.schedule in BIDIRECTIONAL else 1)
            speeds = sorted((device.speed for device in cluster.devices), reverse=True)[: devices * replicas]
            action = min(device.action_seconds for device in cluster.devices)
            seconds = step_bound(self.profile.costs[0], speeds, copies, action_seconds=action)
            return seconds + cluster.step_seconds

        return self.once(("least seconds", devices), bound)

    def once(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return the result of ``make()``, computed once for each key: candidates share schedules, cuts and bounds."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]

    def plan_of(
        self, borders: Sequence[int], devices: Sequence[int], modes: Sequence[Mode], **order: Any
    ) -> Plan:
        """Return the predicted plan of a cut, even if it does not fit.

        Args:
            borders: the first layer of each stage but the first.
            devices: the device of each stage, by its position in the cluster of a replica.
            modes: the mode of each stage.
            order: the fields of the plan that determine the order of its actions.
        """
        groups, names = self.groups, [info.name for info in self.profile.layers]
        homes = [groups.cluster.devices[device].name for device in devices]
        stages = tuple(
            StagePlan(layers=tuple(names[start:end]), device=home).with_mode(mode)
            for (start, end), home, mode in zip(
                pairwise((0, *borders, len(names))), homes, modes, strict=True
            )
        )
        draft = Plan.model_construct(
            stages=stages,
            cluster=self.request.all_devices,
            tensor=self.request.asked.tensor,
            shard=self.request.asked.shard,
            micro_batches=self.costs.micro_batches,
            replica_devices=tuple(
                tuple(groups.members[home][replica] for home in homes)
                for replica in range(1, groups.replicas)
            ),
            profile=self.profile,
            constraints=self.request.asked,
            **order,
        )
        return draft.predict(self.costs)


def parts_of(request: Request) -> Iterator[Part]:
    """Yield the parts of a request."""
    layers = len(request.profile.layers)
    all_groups = [groups for replicas in request.replicas for groups in groupings(request.cluster, replicas)]
    choices: list[tuple[int | None, Profile, list[ReplicaGroups]]] = [(None, request.profile, all_groups)]
    for fewer in range(1, _most_computing(request) + 1):
        beside, _ = with_overhead(request.measured, request.all_devices, fewer * request.asked.tensor)
        fastest = [fastest_devices(groups, fewer) for groups in all_groups if groups.replicas == 1]
        choices.append((fewer, beside, fastest))
    spaces = {id(groups): OrderSpaces(groups.cluster, layers) for *_, chosen in choices for groups in chosen}
    for count, (computing, priced, chosen) in product(request.micro_batches, choices):
        profile = priced.model_copy(update={"costs": (priced.at(count),)})
        together: dict[int, ChainCosts] = {}
        apart = None
        for groups in chosen:
            shards = groups.replicas if request.asked.shard else 1
            if shards not in together:
                together[shards] = _costs(request, profile, False, shards)
            costs = together[shards]
            most = _most_stages(request, groups)
            if request.may_split_ties and len(costs.allowed_borders) + 1 < most:
                costs = apart = apart or _costs(request, profile, True)
            yield Part(request, profile, groups, spaces[id(groups)], costs, computing)


def _most_computing(request: Request) -> int:
    """Return the largest number of devices that has a part of its own: layers are faster beside fewer devices."""
    if request.measured.overhead == Overhead():
        return 0
    return min(most_on_a_host(request.cluster.devices) - 1, len(request.cluster) - 1, FEW_DEVICES)


def _costs(request: Request, profile: Profile, allow_split_ties: bool, shards: int = 1) -> ChainCosts:
    colocate, no_border = request.constraints.colocate, request.constraints.no_border
    return ChainCosts(
        profile, profile.costs[0], colocate, no_border, allow_split_ties, request.gathers_outputs, shards
    )


def _most_stages(request: Request, groups: ReplicaGroups) -> int:
    """Return the number of stages that the request asks for, or else the most that its devices run."""
    if request.stages != "auto":
        return request.stages
    chunks = max(request.chunks_of(name) or 1 for name in request.schedules)
    return min(len(groups.cluster) * chunks, len(request.profile.layers))
