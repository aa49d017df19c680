"""Groups the devices for data parallelism: each stage takes one group, each replica of the model one device of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ...cluster import Cluster, Device
from ...graph_partition.device_orders import device_types
from ..costs.stage_memory import least_memory


@dataclass(frozen=True)
class ReplicaGroups:
    """Groups of similar devices, one device a replica.

    Attributes:
        cluster: one device for each group: named like its first member, as slow as the slowest member, and with the
            memory of the smallest.
        all_devices: the cluster that was given.
        members: the device names of each group, one a replica, by the name of the first.
        identical: True if all devices are alike, so that any grouping is as good as this one.
    """

    cluster: Cluster
    all_devices: Cluster
    members: Mapping[str, tuple[str, ...]]
    identical: bool

    @cached_property
    def least_memory(self) -> float:
        """The bytes of the smallest device; infinite if none has a limit."""
        return least_memory(self.cluster)

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return len(next(iter(self.members.values())))


def groupings(cluster: Cluster, replicas: int) -> list[ReplicaGroups]:
    """Return the groupings to choose from.

    With several hosts there are two: the stages of a replica side by side, so that gradients are summed between hosts,
    or the replicas of a stage, so that stages send to each other between hosts.
    """
    found = [group_devices(cluster, replicas, stages_together=cluster.links_differ)]
    if replicas > 1 and cluster.links_differ:
        other = group_devices(cluster, replicas)
        found += [other] if other.members != found[0].members else []
    return found


def group_devices(cluster: Cluster, replicas: int, *, stages_together: bool = False) -> ReplicaGroups:
    """Group the devices by speed, then by memory, ``replicas`` a group. A remainder of devices stays unused.

    Args:
        cluster: the devices.
        replicas: their number.
        stages_together: True to have the stages of a replica side by side in the cluster; False for the replicas of a
            stage.
    """
    place = {device.name: index for index, device in enumerate(cluster.devices)}
    ranked = sorted(cluster.devices, key=_rank)
    made: list[list[Device]] = []
    if stages_together:
        rest: list[Device] = []
        for _, run in groupby(ranked, key=_rank):
            alike = list(run)
            stages = len(alike) // replicas
            made += [alike[stage : stages * replicas : stages] for stage in range(stages)]
            rest += alike[stages * replicas :]
        ranked = rest
    made += [ranked[start : start + replicas] for start in range(0, len(ranked) - replicas + 1, replicas)]
    # The first replica may also hold the optimizer state.
    groups = [sorted(group, key=lambda device: -_memory(device)) for group in made]
    groups.sort(key=lambda group: place[group[0].name])
    members = {group[0].name: tuple(device.name for device in group) for group in groups}
    return ReplicaGroups(
        cluster if replicas == 1 else _of_one_replica(cluster, groups),
        cluster,
        members,
        len(device_types(cluster)) == 1,
    )


def _of_one_replica(cluster: Cluster, groups: list[list[Device]]) -> Cluster:
    """The devices of the groups' first members, as weak as the weakest, with their part of the ports of hosts."""
    devices = tuple(map(_weakest, groups))
    names = {device.name for device in devices}
    beside = max(max(Counter(device.host for device in group).values()) for group in groups)
    network = tuple(
        tier
        if tier.bandwidth is None
        else tier.model_copy(update={"bandwidth": tier.bandwidth * min(1.0, tier.ports / beside)})
        for tier in cluster.network
    )
    links = tuple(link for link in cluster.links if names >= set(link.between))
    return cluster.model_copy(update={"devices": devices, "links": links, "network": network})


def _rank(device: Device) -> tuple[float, float]:
    return -device.speed, -_memory(device)


def _weakest(group: list[Device]) -> Device:
    limits = [device.memory_bytes for device in group if device.memory_bytes is not None]
    rates = [device.host_bandwidth for device in group]
    weakest = {
        "speed": min(device.speed for device in group),
        "memory_bytes": min(limits, default=None),
        "action_seconds": max(device.action_seconds for device in group),
        "host_bandwidth": None if None in rates else min(rate for rate in rates if rate is not None),
    }
    return group[0].model_copy(update=weakest)


def _memory(device: Device) -> float:
    return math.inf if device.memory_bytes is None else device.memory_bytes
