"""Groups devices for tensor parallelism: each stage runs on a group of equal devices, and planning takes it as one."""

from __future__ import annotations

from ...cluster import Cluster, Device, Network
from ...input_error import InputError


def tensor_groups(cluster: Cluster, tensor: int) -> Cluster:
    """Return the cluster with one device for each group of ``tensor`` devices that share the layers of a stage.

    The members of a group are consecutive in the cluster, and each device is in one group. A group has the name of its
    first member and the memory of its smallest. Its members send their messages at the same time, so a group gets a
    share of the ports of its host.

    Raises:
        ValueError: the number of devices is no multiple of ``tensor``, or a group has unlike devices.
    """
    if tensor == 1:
        return cluster
    if len(cluster) % tensor:
        raise InputError(
            f"tensor={tensor} makes groups of {tensor} devices, and the cluster has {len(cluster)}: give a number that "
            "divides it"
        )
    groups = [cluster.devices[first : first + tensor] for first in range(0, len(cluster), tensor)]
    devices = tuple(map(_group, groups))
    names = {device.name for device in devices}
    first = cluster.devices[0].host
    per_host = sum(device.host == first for device in cluster.devices)
    return cluster.model_copy(
        update={
            "devices": devices,
            "links": tuple(link for link in cluster.links if names >= set(link.between)),
            "network": tuple(_shared(tier, per_host, tensor) for tier in cluster.network),
        }
    )


def group_of(cluster: Cluster, name: str, tensor: int) -> tuple[Device, ...]:
    """Return the devices of the group whose first member has this name."""
    first = cluster.places.index[name]
    return cluster.devices[first : first + tensor]


def _group(devices: tuple[Device, ...]) -> Device:
    """Return the device that stands for a group."""
    first = devices[0]
    for device in devices[1:]:
        if (device.kind, device.speed) != (first.kind, first.speed):
            raise InputError(
                f"tensor={len(devices)} takes consecutive devices as one, which must be alike: {first.name!r} is "
                f"{first.kind!r} with speed {first.speed:g}, {device.name!r} is {device.kind!r} with speed "
                f"{device.speed:g}. List devices that are alike side by side"
            )
    return first.model_copy(
        update={"memory_bytes": min(devices, key=lambda device: device.memory).memory_bytes}
    )


def _shared(network: Network, per_host: int, tensor: int) -> Network:
    """Return the network between hosts as the groups share it: devices of a group that share a port take turns."""
    groups = max(1, per_host // tensor)
    on_a_port = min(tensor, max(1.0, per_host / network.ports))
    bandwidth = None if network.bandwidth is None else network.bandwidth / on_a_port
    return network.model_copy(update={"ports": min(network.ports, groups), "bandwidth": bandwidth})
