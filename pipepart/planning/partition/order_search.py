"""Orders of the devices to search for the cut with the smallest bottleneck."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ...cluster import Cluster, Link
from ...graph_partition.device_orders import (
    DeviceType,
    Orders,
    all_orders,
    count_edges,
    device_types,
    given_order,
    number_links,
)

# Up to this product of layers and edges of the device-state graph, search all orders of the devices.
_MOST_WORK = 250_000
# If links differ, search all orders only up to this many device types; and always up to this product of types and
# edges: each edge needs memory for each type.
_MOST_TYPES, _MOST_CELLS = 40, 2_000_000


class Space(NamedTuple):
    """Orders of devices to search: device types, walks through the device-state graph, and the links by number."""

    types: tuple[DeviceType, ...]
    orders: Orders
    links: tuple[Link, ...]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The devices of each type, by their positions in the cluster."""
        return [kind.devices for kind in self.types]


class OrderSpaces:
    """The orders of the devices of a cluster to search, for each number of stages. Each is computed once.

    Args:
        cluster: the devices. Stages may use any of them in any order.
        layers: the number of layers to cut.

    Attributes:
        cluster: as given.
        types: the types of its devices.
    """

    def __init__(self, cluster: Cluster, layers: int) -> None:
        self.cluster, self.types = cluster, device_types(cluster)
        self._most_edges = min(_MOST_WORK // layers, _MOST_CELLS // len(self.types))
        self._all: dict[int, Space | None] = {}
        self._edges: dict[int, int] = {}

    def all(self, stages: int) -> Space | None:
        """Return all orders of devices for this many stages; None if there are too many to search."""
        if stages not in self._all:
            self._all[stages] = self._all_orders(stages)
        return self._all[stages]

    def edges(self, stages: int) -> int:
        """Return about the number of edges of the orders to search, without making them."""
        if stages not in self._edges:
            count = count_edges([kind.devices for kind in self.types], stages, self._most_edges)
            self._edges[stages] = count if count <= self._most_edges else stages
        return self._edges[stages]

    def given(self, order: Sequence[int]) -> Space:
        """Return the space with a single order of devices, by their positions in the cluster."""
        names = [self.cluster.devices[index].name for index in order]
        links = [self.cluster.link_between(*pair) for pair in itertools.pairwise(names)]
        different = list(dict.fromkeys(links)) or [self.cluster.link]
        borders = [different.index(link) for link in links]
        groups = [kind.devices for kind in self.types]
        return Space(self.types, given_order(groups, order, borders), tuple(different))

    def relaxed(self, stages: int) -> Space:
        """Return one order of devices that are each as good as the best, with the best link between any two.

        The smallest bottleneck of this space is a lower bound for every order of the devices.
        """
        cluster = self.cluster
        links = (cluster.link, *cluster.links, *cluster.network)
        per_byte = min(link.seconds_per_byte for link in links)
        best = Link(latency=min(link.latency for link in links), bandwidth=1 / per_byte if per_byte else None)
        everything = DeviceType(
            "any",
            max(kind.speed for kind in self.types),
            max(kind.memory for kind in self.types),
            tuple(range(len(cluster))),
        )
        return Space((everything,), given_order([everything.devices], range(stages)), (best,))

    def few(self, stages: int) -> list[tuple[int, ...]]:
        """Return some orders, host after host: in the cluster's order, by speed, and by memory."""
        devices = self.cluster.devices

        def of_host(key: Sequence[float]) -> tuple[int, ...]:
            hosts: dict[str, list[int]] = {}
            for index in sorted(range(len(devices)), key=lambda at: (key[at], at)):
                hosts.setdefault(devices[index].host, []).append(index)
            return tuple(itertools.chain.from_iterable(hosts.values()))[:stages]

        keys = (
            [0.0] * len(devices),
            [-device.speed for device in devices],
            [-device.memory for device in devices],
        )
        return list(dict.fromkeys(of_host(key) for key in keys))

    def _all_orders(self, stages: int) -> Space | None:
        if self.cluster.links_differ and len(self.types) > _MOST_TYPES:
            return None
        numbers, links = number_links(self.cluster, self.types)
        orders = all_orders(
            [kind.devices for kind in self.types],
            stages,
            links=numbers,
            most_edges=self._most_edges,
        )
        return Space(self.types, orders, links) if orders.complete else None
