"""Groups devices for data parallelism: a stage has a group of devices, one device for each replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from ...cluster import Cluster, Device
from ...graph_partition.device_orders import device_types


@dataclass(frozen=True)
class ReplicaGroups:
    """Groups of similar devices, each with one device per replica.

    Attributes:
        cluster: one device for each group. It has the name of the first member, the speed of the slowest member, and
            the memory of the smallest member.
        all_devices: the cluster with all devices.
        members: the device names of each group, one per replica, by the name of the first.
        identical: True if all devices are alike, so that no other grouping or choice of devices can be better.
    """

    cluster: Cluster
    all_devices: Cluster
    members: Mapping[str, tuple[str, ...]]
    identical: bool

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return len(next(iter(self.members.values())))


def fastest_devices(groups: ReplicaGroups, count: int) -> ReplicaGroups:
    """Return groups of one device each for the fastest devices, those with more memory first."""
    kept = {device.name for device in sorted(groups.cluster.devices, key=_rank)[:count]}
    devices = [[device] for device in groups.cluster.devices if device.name in kept]
    members = {name: groups.members[name] for name in groups.members if name in kept}
    return replace(groups, cluster=_of_one_replica(groups.cluster, devices), members=members)


def groupings(cluster: Cluster, replicas: int) -> list[ReplicaGroups]:
    """Return the groupings to choose from.

    If links differ, as with several hosts, there are two. With the stages of a replica side by side, gradients are
    summed between hosts. With the replicas of a stage side by side, stages send messages between hosts.
    """
    first = group_devices(cluster, replicas, stages_together=cluster.links_differ)
    if replicas > 1 and cluster.links_differ:
        second = group_devices(cluster, replicas)
        if second.members != first.members:
            return [first, second]
    return [first]


def group_devices(cluster: Cluster, replicas: int, *, stages_together: bool = False) -> ReplicaGroups:
    """Group the devices by speed, then by memory, ``replicas`` per group. The remaining devices stay unused.

    Args:
        cluster: the devices.
        replicas: the number of replicas.
        stages_together: True to place the stages of a replica side by side in the cluster; False to place the replicas
            of a stage side by side.
    """
    place = {device.name: index for index, device in enumerate(cluster.devices)}
    ranked = sorted(cluster.devices, key=_rank)
    unsorted: list[list[Device]] = []
    if stages_together:
        rest: list[Device] = []
        for _, run in groupby(ranked, key=_rank):
            alike = list(run)
            stages = len(alike) // replicas
            unsorted += [alike[stage : stages * replicas : stages] for stage in range(stages)]
            rest += alike[stages * replicas :]
        ranked = rest
    unsorted += [ranked[start : start + replicas] for start in range(0, len(ranked) - replicas + 1, replicas)]
    # The first replica gets the device with the most memory: it may also hold the optimizer state.
    groups = [sorted(group, key=lambda device: -device.memory) for group in unsorted]
    groups.sort(key=lambda group: place[group[0].name])
    members = {group[0].name: tuple(device.name for device in group) for group in groups}
    return ReplicaGroups(
        cluster if replicas == 1 else _of_one_replica(cluster, groups),
        cluster,
        members,
        len(device_types(cluster)) == 1,
    )


def _of_one_replica(cluster: Cluster, groups: list[list[Device]]) -> Cluster:
    """Return the cluster of one replica: the weakest device of each group, and its share of the ports of hosts."""
    devices = tuple(map(_weakest, groups))
    names = {device.name for device in devices}
    per_host = max(max(Counter(device.host for device in group).values()) for group in groups)
    network = tuple(
        tier
        if tier.bandwidth is None
        else tier.model_copy(update={"bandwidth": tier.bandwidth * min(1.0, tier.ports / per_host)})
        for tier in cluster.network
    )
    links = tuple(link for link in cluster.links if names >= set(link.between))
    return cluster.model_copy(update={"devices": devices, "links": links, "network": network})


def _rank(device: Device) -> tuple[float, float]:
    return -device.speed, -device.memory


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
