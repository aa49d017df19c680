"""Orders of devices along a pipeline, as walks through states that count the devices in use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster, Device, Link

Ints = NDArray[np.int64]
Groups = Sequence[Sequence[int]]

NOBODY = -1  # in place of a device type: no device
# Of very many devices, only a few in a row may be left out, so that a single order has about this many edges.
_MOST_EDGES_OF_ORDER = 1 << 17


@dataclass(frozen=True)
class DeviceType:
    """Interchangeable devices: kind, speed, memory in bytes (infinite for no limit), and positions in the cluster."""

    kind: str
    speed: float
    memory: float
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Orders:
    """Orders of devices along a pipeline, as walks through states.

    A state counts the devices of each type that the stages from a border to the end may use. An edge adds one stage in
    front of these stages and leads from state ``rest`` to ``state``. If links differ, the cost of a border depends on
    both of its devices. A state then also has the type of its first device, and the type of the device before it. ::

        no device ──a──► {a} ──b──► {a, b}      devices a and b of two types: upper walk: order b a,
            └─────b──► {b} ──a────┘             lower walk: order a b

    Attributes:
        rest, state: start and end state of each edge, [edges]; ``rest`` has the lower index. Sorted by ``state``.
        type: device type of the new stage of each edge, [edges].
        before, after: index of the link from the new stage to the stage before and to the stage after it, [edges]; 0
            if there is no such stage.
        available: number of devices of each type in each state, [states, types].
        ends: states that may follow the last stage.
        full: states that may start at the first stage.
        complete: whether the walks include every order of the devices.
    """

    rest: Ints
    state: Ints
    type: Ints
    before: Ints
    after: Ints
    available: Ints
    ends: Ints
    full: Ints
    complete: bool

    @property
    def left(self) -> Ints:
        """Number of stages from the new stage of each edge to the end, [edges]. Only if no device is left out."""
        return self.available[self.state].sum(axis=1)


def all_orders(
    groups: Groups,
    stages: int,
    *,
    links: Ints | None = None,
    leave_out: bool = False,
    most_edges: float = math.inf,
) -> Orders:
    """Return all orders of devices for ``stages`` stages; only the cluster's order if there are too many edges.

    Eight devices of different types have 1,024 edges, and 10,864 edges if their links differ.

    Args:
        groups: positions in the cluster of the devices of each type.
        stages: number of stages.
        links: index of the link between two device types, [types, types]; None if all links are equal.
        leave_out: whether there may also be fewer stages. Not allowed with ``links``.
        most_edges: with more edges than this and several types, the result has only the cluster's order.
    """
    if len(groups) > 1 and count_edges(groups, stages, most_edges) > most_edges:
        return given_order(groups, range(sum(map(len, groups)))[:stages], leave_out=leave_out)
    last = range(len(groups)) if links is not None else [NOBODY]
    level = [((0,) * len(groups), NOBODY, kind) for kind in last]
    number = {state: index for index, state in enumerate(level)}
    ends = list(number.values())
    edges: list[tuple[int, ...]] = []
    for left in range(1, stages + 1):
        reached: dict[tuple[tuple[int, ...], int, int], None] = {}
        for state in level:
            for kind, taken, before in _steps(groups, state, left == stages, links is not None):
                target = (taken, NOBODY if links is None else kind, before)
                reached[target] = None
                borders = _link(links, before, kind), _link(links, kind, state[1])
                edges.append((number[state], number.setdefault(target, len(number)), kind, *borders))
            if len(groups) > 1 and len(edges) > most_edges:
                devices = range(sum(map(len, groups)))[:stages]
                return given_order(groups, devices, leave_out=leave_out)
        level = list(reached)
    available = np.array([taken for taken, _, _ in number])
    full = [number[state] for state in level]
    return make_orders(edges, available, range(len(number)) if leave_out else ends, full, complete=True)


def count_edges(groups: Groups, stages: int, most: float) -> int:
    """Return the number of edges of :func:`all_orders` without links, or a number above ``most``; with links fewer.

    An edge leads from each state with less than ``stages`` devices, for each type with a device left.
    """
    sizes, total = Counter(map(len, groups)), 0
    for size, count in sizes.items():
        states = np.ones(1)
        for other, times in sizes.items():
            for number in range(times):
                least = other - (other == size and not number)  # one device of the type is for the next stage
                states = np.convolve(states, np.ones(least + 1))[:stages]
                if states.sum() > most:
                    return int(most) + 1
        total += count * int(states.sum())
    return total


def given_order(
    groups: Groups, devices: Sequence[int], borders: Sequence[int] = (), *, leave_out: bool = False
) -> Orders:
    """Return a single order of devices; state ``i`` has the last ``i`` devices.

    Args:
        groups: positions in the cluster of the devices of each type.
        devices: positions in the cluster, in pipeline order.
        borders: index of the link between each two neighbours; empty if all links are equal.
        leave_out: whether any device may be left out. Not allowed with ``borders``.
    """
    most = max(1, _MOST_EDGES_OF_ORDER // len(devices)) if leave_out else 1
    type_of = {device: index for index, group in enumerate(groups) for device in group}
    row = [type_of[device] for device in reversed(devices)]
    links = [0, *reversed(borders or [0] * (len(row) - 1)), 0]
    edges = [
        (rest, state, kind, links[rest + 1], links[rest])
        for rest, kind in enumerate(row)
        for state in range(rest + 1, min(rest + most, len(row)) + 1)
    ]
    taken = np.zeros((len(row), len(groups)), dtype=np.int64)
    taken[range(len(row)), row] = 1
    available = np.vstack([np.zeros_like(taken[:1]), np.cumsum(taken, axis=0)])
    ends = range(len(available)) if leave_out else [0]
    return make_orders(edges, available, ends, [len(row)], complete=False)


def devices_of(groups: Groups, types: Sequence[int]) -> tuple[int, ...]:
    """Return the position in the cluster of each stage's device; devices of one type are used in cluster order."""
    used = Counter[int]()
    devices = []
    for kind in types:
        devices.append(groups[kind][used[kind]])
        used[kind] += 1
    return tuple(devices)


def device_types(cluster: Cluster) -> tuple[DeviceType, ...]:
    """Group the devices of a cluster by type: exchanging two devices of a type changes no cost."""
    groups: dict[Hashable, list[list[int]]] = {}
    paired = {name for link in cluster.links for name in link.between}
    differ = cluster.links_differ
    for index, device in enumerate(cluster.devices):
        # Devices of a host without pair links are interchangeable. Only devices with pair links must be compared.
        has_pair_link = device.name in paired
        key = (
            *_class(device),
            device.action_seconds,
            device.host_bandwidth,
            device.host if differ else "",
            has_pair_link,
        )
        alike = groups.setdefault(key, [])
        for group in alike:
            if not has_pair_link or _same_links(cluster, group[0], index):
                group.append(index)
                break
        else:
            alike.append([index])
    in_order = sorted(group for alike in groups.values() for group in alike)
    return tuple(DeviceType(*_class(cluster.devices[group[0]]), tuple(group)) for group in in_order)


def distinct_orders(cluster: Cluster, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield the distinct orders of ``devices`` devices, as positions in the cluster; the cluster's order comes first.

    Exchanging two devices of one type gives no distinct order.
    """
    groups = [kind.devices for kind in device_types(cluster)]
    # Depth first, without recursion, as there may be thousands of devices. An entry is (type of the last device, entry
    # of the devices before it).
    stack: list[tuple] = [()]
    while stack:
        entry, order = stack.pop(), []
        rest = entry
        while rest:
            kind, rest = rest
            order.append(kind)
        if len(order) == devices:
            yield devices_of(groups, order[::-1])
            continue
        used = Counter(order)
        free = [kind for kind, group in enumerate(groups) if used[kind] < len(group)]
        stack += [(kind, entry) for kind in sorted(free, key=lambda kind: -groups[kind][used[kind]])]


def number_links(cluster: Cluster, types: Sequence[DeviceType]) -> tuple[Ints | None, tuple[Link, ...]]:
    """Return the index of the link between each two device types, [types, types], and the links.

    The indices are None if all links are equal.
    """
    if not cluster.links_differ:
        return None, (cluster.link,)
    numbers: dict[tuple[float, float], int] = {}
    table = np.zeros((len(types), len(types)), dtype=np.int64)
    links: list[Link] = []
    for row, source in enumerate(types):
        for column, target in enumerate(types):
            # The first and the last device, so that two stages on one type get two devices.
            names = cluster.devices[source.devices[0]].name, cluster.devices[target.devices[-1]].name
            link = cluster.link_between(*names)
            table[row, column] = numbers.setdefault((link.seconds_per_byte, link.latency), len(links))
            if len(numbers) > len(links):
                links.append(link)
    return table, tuple(links)


def _class(device: Device) -> tuple[str, float, float]:
    return device.kind, device.speed, device.memory


def _same_links(cluster: Cluster, first: int, second: int) -> bool:
    """Return True if two devices have the same link to every third device."""
    a, b = cluster.devices[first].name, cluster.devices[second].name
    # The link between a and b needs no check: with a third device of their type, it equals the link to that device.
    third = [device.name for device in cluster.devices if device.name not in (a, b)]
    pairs = [(cluster.link_between(a, name), cluster.link_between(b, name)) for name in third]
    return all((x.seconds_per_byte, x.latency) == (y.seconds_per_byte, y.latency) for x, y in pairs)


def _link(links: Ints | None, source: int, target: int) -> int:
    return 0 if links is None or NOBODY in (source, target) else int(links[source, target])


def _steps(
    groups: Groups,
    state: tuple[tuple[int, ...], int, int],
    last: bool,
    links: bool,
) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yield the device type of the next stage, the devices of each type then in use, and the type before it."""
    taken, _, announced = state
    for kind in [announced] if links else range(len(groups)):
        if taken[kind] == len(groups[kind]):
            continue
        used = (*taken[:kind], taken[kind] + 1, *taken[kind + 1 :])
        if not links or last:
            yield kind, used, NOBODY
            continue
        for before in range(len(groups)):
            if used[before] < len(groups[before]):
                yield kind, used, before


def make_orders(
    edges: Sequence[tuple[int, ...]],
    available: Ints,
    ends: Sequence[int],
    full: Sequence[int],
    *,
    complete: bool,
) -> Orders:
    """Return the orders with the edges (rest, state, type, index of the link before, index of the link after)."""
    table = np.array(sorted(edges, key=lambda edge: edge[1]), dtype=np.int64).reshape(-1, 5)
    rest, state, kind, before, after = table.T
    return Orders(
        rest, state, kind, before, after, available, np.array(ends), np.array(full), complete
    )  # fmt: skip
