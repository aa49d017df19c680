"""The devices shared out among several copies of the model: a stage takes a group of them, each copy one of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...cluster import Cluster
from .device_orders import device_types


@dataclass(frozen=True)
class Slots:
    """Groups of devices that are as like as can be.

    Attributes:
        cluster: a device for each group, with the name of its first, as slow as the slowest and as small as the
            smallest of them.
        whole: all devices.
        members: the names in each group, one a copy, by that of its first.
        alike: whether all devices are, so that it does not matter which are in a group.
    """

    cluster: Cluster
    whole: Cluster
    members: Mapping[str, tuple[str, ...]]
    alike: bool

    @property
    def copies(self) -> int:
        """How many copies of the model there are."""
        return len(next(iter(self.members.values())))


def share_out(cluster: Cluster, copies: int) -> Slots:
    """Groups of so many devices each, the fast ones and the large ones together; the last ones may be left over."""
    ranked = sorted(
        cluster.devices, key=lambda device: (-device.speed, -(device.memory_bytes or float("inf")))
    )
    groups = [
        # The first copy of the model has the state of the optimizer besides.
        sorted(ranked[start : start + copies], key=lambda device: -(device.memory_bytes or float("inf")))
        for start in range(0, len(ranked) - copies + 1, copies)
    ]
    groups.sort(key=lambda group: cluster.devices.index(group[0]))
    names = {group[0].name for group in groups}
    limits = [
        [device.memory_bytes for device in group if device.memory_bytes is not None] for group in groups
    ]
    slots = tuple(
        group[0].model_copy(
            update={
                "speed": min(device.speed for device in group),
                "memory_bytes": min(limit, default=None),
            }
        )
        for group, limit in zip(groups, limits, strict=True)
    )
    links = tuple(link for link in cluster.links if names.issuperset(link.between))
    return Slots(
        cluster if copies == 1 else Cluster(devices=slots, link=cluster.link, links=links),
        cluster,
        {group[0].name: tuple(device.name for device in group) for group in groups},
        len(device_types(cluster)) == 1,
    )
