"""Looks up the link between two devices, and the host ports that a message between them passes.

::

    rack:0 ─────────────── network[1] ─────────────── rack:1
      host:0 ── network[0] ── host:1                    host:0 ...
        device ─ link ─ device

Two devices are joined by the lowest tier that contains both. All look-ups take constant time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .devices import Device
from .links import Link, Network, PairLink

Port = tuple[str, int, str]  # host or group, index of the port, "out" or "in"
Route = tuple[tuple[Port, float], ...]  # each port that a message passes, and its bytes per second


class Places:
    """Index of the devices of a cluster, their hosts and groups of hosts, and their links.

    Args:
        devices: devices with unique names.
        link: the link within a host.
        links: links of single pairs.
        network: the networks between hosts, one per tier, from the nearest outward.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        link: Link,
        links: Sequence[PairLink],
        network: Sequence[Network],
    ) -> None:
        self._names = [device.name for device in devices]
        self.index = {name: position for position, name in enumerate(self._names)}
        self.groups = {device.name: _groups(device.host, len(network)) for device in devices}
        self.differ = bool(links) or len(set(self.groups.values())) > 1
        self._network = network
        self._links = [link, *(_joined(network[: tier + 1]) for tier in range(len(network)))]
        self._pairs = {pair: joined for joined in links for pair in (joined.between, joined.between[::-1])}
        self._ports = [self._shared_ports(tier, joined.ports) for tier, joined in enumerate(network)]
        self._seconds: dict[tuple[int, int], tuple[float, float]] = {}

    def _shared_ports(self, tier: int, ports: int) -> dict[str, int]:
        """Return the port index of each device in its group. Neighbours share a port, as evenly as possible."""
        members: dict[str, list[str]] = {}
        for name, groups in self.groups.items():
            members.setdefault(groups[tier], []).append(name)
        return {
            name: position * ports // len(names)
            for names in members.values()
            for position, name in enumerate(names)
        }

    def tier(self, first: str, second: str) -> int:
        """Return the lowest tier that contains both devices: 0 for one host, 1 for ``network[0]``."""
        here, there = self.groups[first], self.groups[second]
        if here == there:
            return 0
        return 1 + max(tier for tier in range(len(here)) if here[tier] != there[tier])

    def link(self, sender: str, receiver: str) -> Link:
        """Return the link between two devices."""
        pair = self._pairs.get((sender, receiver)) if self._pairs else None
        return self._links[self.tier(sender, receiver)] if pair is None else pair

    def seconds(self, sender: int, receiver: int) -> tuple[float, float]:
        """Return the latency and the seconds per byte between devices, by their positions; zeros to itself."""
        known = self._seconds.get((sender, receiver))
        if known is None:
            link = self.link(self._names[sender], self._names[receiver])
            known = (0.0, 0.0) if sender == receiver else (link.latency, link.seconds_per_byte)
            self._seconds[sender, receiver] = known
        return known

    def route(self, sender: str, receiver: str) -> Route:
        """Return the ports that a message passes; empty within a host, or if ``links`` has the pair."""
        if sender == receiver or (sender, receiver) in self._pairs:
            return ()
        return tuple(
            (
                (self.groups[name][tier], self._ports[tier][name], way),
                self._network[tier].bandwidth or math.inf,
            )
            for tier in range(self.tier(sender, receiver))
            for name, way in ((sender, "out"), (receiver, "in"))
        )


def _joined(tiers: Sequence[Network]) -> Link:
    """Return the link through several tiers: the lowest bandwidth, and the latency of the outermost tier."""
    slowest = min((tier.bandwidth for tier in tiers if tier.bandwidth is not None), default=None)
    return Link(bandwidth=slowest, latency=tiers[-1].latency, compress=tiers[-1].compress)


def _groups(host: str, tiers: int) -> tuple[str, ...]:
    """Return the host and the groups that contain it, from the host outward."""
    parts = host.split("/")
    return tuple("/".join(parts[: len(parts) - tier]) for tier in range(tiers))
