"""Where the devices of a cluster are, and the link and the ports between two of them, without a search.

::

    rack:0 ─────────────── network[1] ─────────────── rack:1
      host:0 ── network[0] ── host:1                    host:0 ...
        device ─ link ─ device

Two devices are joined by the lowest tier that has both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .devices import Device
from .links import Link, Network, PairLink

Port = tuple[str, int, str]  # host or group, number of its port, "out" or "in"
Route = tuple[tuple[Port, float], ...]  # the ports of a message, and the bytes per second of each


class Places:
    """The devices by name, their groups from the host outward, and the links of single pairs.

    Args:
        devices: with unique names.
        link: within a host.
        links: of single pairs.
        network: of the tiers above the hosts, the nearest first.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        link: Link,
        links: Sequence[PairLink],
        network: Sequence[Network],
    ) -> None:
        self.index = {device.name: position for position, device in enumerate(devices)}
        self._network = network
        self._links = [link, *(_joined(network[: tier + 1]) for tier in range(len(network)))]
        self._pairs: dict[tuple[str, str], Link] = {}
        for one in links:
            here, there = one.between
            self._pairs[here, there] = self._pairs[there, here] = one
        self.groups = {device.name: _groups(device.host, len(network)) for device in devices}
        self._ports: list[dict[str, int]] = []
        for tier, joined in enumerate(network):
            members: dict[str, list[str]] = {}
            for device in devices:
                members.setdefault(self.groups[device.name][tier], []).append(device.name)
            shares = {
                name: place * joined.ports // len(own)
                for own in members.values()
                for place, name in enumerate(own)
            }
            self._ports.append(shares)
        self.differ = bool(links) or len({self.groups[device.name] for device in devices}) > 1

    def tier(self, one: str, other: str) -> int:
        """Return the lowest tier that has both devices: 0 for one host, 1 for ``network[0]``."""
        here, there = self.groups[one], self.groups[other]
        if here == there:
            return 0
        return 1 + max(tier for tier in range(len(here)) if here[tier] != there[tier])

    def link(self, one: str, other: str) -> Link:
        """Return the link between two devices."""
        if self._pairs and (pair := self._pairs.get((one, other))) is not None:
            return pair
        return self._links[self.tier(one, other)]

    def route(self, one: str, other: str) -> Route:
        """Return the ports that a message passes; none within a host, and on a link of the pair's own."""
        if one == other or (one, other) in self._pairs:
            return ()
        return tuple(
            (
                (self.groups[name][tier], self._ports[tier][name], way),
                self._network[tier].bandwidth or math.inf,
            )
            for tier in range(self.tier(one, other))
            for name, way in ((one, "out"), (other, "in"))
        )


def _joined(tiers: Sequence[Network]) -> Link:
    """The link through these tiers: no faster than the slowest, with the latency of the outermost."""
    rates = [tier.bandwidth for tier in tiers if tier.bandwidth is not None]
    slowest = min(rates, default=None)
    return Link(bandwidth=slowest, latency=tiers[-1].latency, compress=tiers[-1].compress)


def _groups(host: str, tiers: int) -> tuple[str, ...]:
    """The names of a device's groups, its host first, then what is around it."""
    parts = host.split("/")
    return tuple("/".join(parts[: len(parts) - tier]) for tier in range(tiers))
