"""Groups the devices for data parallelism: each stage takes one group, each replica of the model one device of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...cluster import Cluster, Device
from .device_orders import device_types


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

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return len(next(iter(self.members.values())))


def group_devices(cluster: Cluster, replicas: int) -> ReplicaGroups:
    """Group the devices by speed, then by memory, ``replicas`` a group. A remainder of devices stays unused."""
    ranked = sorted(cluster.devices, key=lambda device: (-device.speed, -_memory(device)))
    groups = [
        # The first replica also holds the optimizer state.
        sorted(ranked[start : start + replicas], key=lambda device: -_memory(device))
        for start in range(0, len(ranked) - replicas + 1, replicas)
    ]
    groups.sort(key=lambda group: cluster.devices.index(group[0]))
    members = {group[0].name: tuple(device.name for device in group) for group in groups}
    links = tuple(link for link in cluster.links if members.keys() >= set(link.between))
    return ReplicaGroups(
        cluster
        if replicas == 1
        else cluster.model_copy(update={"devices": tuple(map(_weakest, groups)), "links": links}),
        cluster,
        members,
        len(device_types(cluster)) == 1,
    )


def _weakest(group: list[Device]) -> Device:
    limits = [device.memory_bytes for device in group if device.memory_bytes is not None]
    weakest = {"speed": min(device.speed for device in group), "memory_bytes": min(limits, default=None)}
    return group[0].model_copy(update=weakest)


def _memory(device: Device) -> float:
    return math.inf if device.memory_bytes is None else device.memory_bytes
