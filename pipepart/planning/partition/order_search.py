"""Device orders for large clusters: a relaxation that gives a lower bound, and starting orders for local search.

Two relaxations have few states. Where all devices are alike, only the lengths of the runs of stages on one host count::

    host 0     host 1          host 0            runs of 2, 3 and 1 stages: the hosts need enough devices for them
    [0  1] ──▶ [2  3  4] ──▶ [5]

Where devices differ, every border gets the best link, and devices are rounded up to a few types.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...cluster import Cluster, Link
from ...graph_partition.device_orders import (
    DeviceType,
    Orders,
    all_orders,
    device_types,
    given_order,
    make_orders,
    number_links,
)

# If links differ, search all orders only up to this many device types: each edge needs memory for each type.
_MOST_TYPES = 40
_ROUNDED = 8  # number of types that devices are rounded up to; fewer if these still have too many orders


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
        most_edges: the largest number of edges of a device-state graph to search.

    Attributes:
        cluster: as given.
        types: the types of its devices.
    """

    def __init__(self, cluster: Cluster, most_edges: float) -> None:
        self.cluster, self.types, self._most_edges = cluster, device_types(cluster), most_edges
        self._all: dict[int, Space | None] = {}
        self._relaxed: dict[int, tuple[Space, bool]] = {}

    def all(self, stages: int) -> Space | None:
        """Return all orders of devices for this many stages; None if there are too many to search."""
        if stages not in self._all:
            self._all[stages] = self._all_orders(stages)
        return self._all[stages]

    def relaxed(self, stages: int) -> tuple[Space, bool]:
        """Return the result of :func:`relaxed_space` for this many stages."""
        if stages not in self._relaxed:
            self._relaxed[stages] = relaxed_space(self.cluster, self.types, stages, self._most_edges)
        return self._relaxed[stages]

    def given(self, order: Sequence[int]) -> Space:
        """Return the space with a single order of devices, by their positions in the cluster."""
        names = [self.cluster.devices[index].name for index in order]
        links = [self.cluster.link_between(*pair) for pair in itertools.pairwise(names)]
        different = list(dict.fromkeys(links)) or [self.cluster.link]
        borders = [different.index(link) for link in links]
        groups = [kind.devices for kind in self.types]
        return Space(self.types, given_order(groups, order, borders), tuple(different))

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


def relaxed_space(
    cluster: Cluster, types: Sequence[DeviceType], stages: int, most_edges: float
) -> tuple[Space, bool]:
    """Return relaxed orders, the best of which is no worse than any real order; True if they are runs on hosts."""
    merged: dict[tuple[str, float, float], tuple[int, ...]] = {}
    for kind in types:
        key = kind.kind, kind.speed, kind.memory
        merged[key] = (*merged.get(key, ()), *kind.devices)
    kinds = tuple(DeviceType(*key, devices) for key, devices in merged.items())
    if len(kinds) == 1 and cluster.network and not cluster.links:
        hosts = _host_sizes(cluster)
        return Space(
            kinds, _runs(stages, max(hosts.values())), (cluster.link, _best_link(cluster.network))
        ), True
    best = _best_link([cluster.link, *cluster.links, *cluster.network])
    count = _ROUNDED
    while True:
        rounded = _rounded_up(kinds, count)
        orders = all_orders([kind.devices for kind in rounded], stages, most_edges=most_edges)
        if orders.complete:  # always true of the orders of a single type
            return Space(rounded, orders, (best,)), False
        count //= 2


def first_orders(cluster: Cluster, stages: int) -> list[tuple[int, ...]]:
    """Return starting orders, host after host: in the cluster's order, by speed, and by memory."""

    def of_host(key: Sequence[float]) -> tuple[int, ...]:
        hosts: dict[str, list[int]] = {}
        for index in sorted(range(len(cluster)), key=lambda at: (key[at], at)):
            hosts.setdefault(cluster.devices[index].host, []).append(index)
        return tuple(itertools.chain.from_iterable(hosts.values()))[:stages]

    memory = [math.inf if device.memory_bytes is None else device.memory_bytes for device in cluster.devices]
    keys = ([0.0] * len(cluster), [-device.speed for device in cluster.devices], [-size for size in memory])
    return list(dict.fromkeys(of_host(key) for key in keys))


def order_of_runs(cluster: Cluster, runs: Sequence[int]) -> tuple[int, ...] | None:
    """Return devices for runs of stages, each run on one host, the longest placed first; None if a run does not fit."""
    free = dict[str, list[int]]()
    for index, device in enumerate(cluster.devices):
        free.setdefault(device.host, []).append(index)
    placed: dict[int, list[int]] = {}
    for number in sorted(range(len(runs)), key=lambda at: (-runs[at], at)):
        host = next((devices for devices in free.values() if len(devices) >= runs[number]), None)
        if host is None:
            return None
        placed[number], host[:] = host[: runs[number]], host[runs[number] :]
    return tuple(itertools.chain.from_iterable(placed[number] for number in range(len(runs))))


def _runs(stages: int, longest: int) -> Orders:
    """Return walks of runs on hosts. States: stages to the end, length of the first run, link before it."""
    number: dict[tuple[int, int, int], int] = {(0, 0, 1): 0}
    edges: list[tuple[int, ...]] = []
    level = [(0, 0, 1)]
    for left in range(1, stages + 1):
        reached: dict[tuple[int, int, int], None] = {}
        for state in level:
            length = 1 if state[2] else state[1] + 1
            befores = [1] if left == stages or length == longest else [0, 1]
            for before in befores:
                target = left, length, before
                reached[target] = None
                edges.append((number[state], number.setdefault(target, len(number)), 0, before, state[2]))
        level = list(reached)
    available = np.array([[left] for left, _, _ in number])
    return make_orders(edges, available, [0], [number[state] for state in level], complete=True)


def _rounded_up(kinds: Sequence[DeviceType], most: int) -> tuple[DeviceType, ...]:
    """Round devices up to at most ``most`` types: devices of similar speed get the best speed and memory among them."""
    ranked = sorted(kinds, key=lambda kind: -kind.speed)
    parts = [part for part in np.array_split(np.arange(len(ranked)), min(most, len(ranked))) if part.size]
    return tuple(
        DeviceType(
            similar[0].kind,
            max(kind.speed for kind in similar),
            max(kind.memory for kind in similar),
            tuple(device for kind in similar for device in kind.devices),
        )
        for similar in ([ranked[at] for at in part] for part in parts)
    )


def _best_link(links: Sequence[Link]) -> Link:
    rates = [link.message_bandwidth for link in links]
    fastest = None if None in rates else max(rate for rate in rates if rate is not None)
    return Link(bandwidth=fastest, latency=min(link.latency for link in links))


def _host_sizes(cluster: Cluster) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for device in cluster.devices:
        sizes[device.host] = sizes.get(device.host, 0) + 1
    return sizes
