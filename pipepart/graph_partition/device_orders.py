"""The device-state graph of the cut searches: which devices the stages from a border to the end may use."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster, Device, Link

Ints = NDArray[np.int64]
Groups = Sequence[Sequence[int]]

NOBODY = -1


@dataclass(frozen=True)
class DeviceType:
    """Devices that are alike: kind, speed, memory in bytes (infinite for no limit), and positions in the cluster."""

    kind: str
    speed: float
    memory: float
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Orders:
    """Orders of devices along a pipeline, as walks through states.

    A state counts the devices of each type that the stages from a border to the end may use. An edge adds one stage in
    front of them: it leads from ``rest`` to ``state``. If links differ, the cost of a border depends on both of its
    devices: a state then also has the type of its front device, and that of the device before it. Hosts that are alike
    are entered in the order of the cluster, from the end of the pipeline on. ::

        no device ──a──► {a} ──b──► {a, b}      two unlike devices: the order b a is one walk,
            └─────b──► {b} ──a────┘             the order a b the other

    Attributes:
        rest, state: the states of each edge; ``rest`` has the lower number. Edges to one state are side by side.
        type: of the device that the new stage is on.
        before, after: the numbers of the links to the stages before and behind it; 0 where there is none.
        available: number of devices of each type in each state; shape (states, types).
        ends: states behind which there may be no stage.
        full: states that the first stage may begin in.
        complete: whether every order of the devices is a walk.
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
        """Number of stages from the new one to the end, from 1 on, if no device may be left out."""
        return self.available[self.state].sum(axis=1)


def all_orders(
    groups: Groups,
    stages: int,
    *,
    links: Ints | None = None,
    twins: Sequence[Sequence[int]] = (),
    leave_out: bool = False,
    most_edges: float = math.inf,
) -> Orders:
    """Return every way to put ``stages`` stages on devices; only the cluster's order if there are too many edges.

    Eight unlike devices have 1,024 edges, and 10,864 with unlike links.

    Args:
        groups: the devices of each type, by their positions in the cluster.
        stages: their number.
        links: the number of the link between devices of two types, [types, types]; None if all are alike.
        twins: for each type, the types of the host that a pipeline must have entered first; empty if there is none.
        leave_out: whether there may also be fewer stages. Not together with ``links``.
        most_edges: above it the result is :func:`given_order`, unless there is one type only.
    """
    earlier = twins or [()] * len(groups)
    last = [kind for kind in range(len(groups)) if not earlier[kind]]
    level = [((0,) * len(groups), NOBODY, kind) for kind in (last if links is not None else [NOBODY])]
    number = {state: index for index, state in enumerate(level)}
    ends = list(number.values())
    edges: list[tuple[int, ...]] = []
    for left in range(1, stages + 1):
        reached: dict[tuple[tuple[int, ...], int, int], None] = {}
        for state in level:
            for kind, taken, before in _steps(groups, state, left == stages, links is not None, earlier):
                target = (taken, NOBODY if links is None else kind, before)
                reached[target] = None
                borders = _link(links, before, kind), _link(links, kind, state[1])
                edges.append((number[state], number.setdefault(target, len(number)), kind, *borders))
            if len(groups) > 1 and len(edges) > most_edges:
                devices = range(sum(map(len, groups)))[:stages]
                return _in_order(groups, devices) if leave_out else given_order(groups, devices)
        level = list(reached)
    available = np.array([taken for taken, _, _ in number])
    full = [number[state] for state in level]
    return make_orders(edges, available, range(len(number)) if leave_out else ends, full, complete=True)


def given_order(groups: Groups, devices: Sequence[int], borders: Sequence[int] = ()) -> Orders:
    """One order of devices, by their positions in the cluster: state ``i`` has the last ``i`` of them.

    Args:
        groups: the devices of each type.
        devices: in order.
        borders: the number of the link between each two neighbours; empty if all links are alike.
    """
    of = {device: index for index, group in enumerate(groups) for device in group}
    row = [of[device] for device in reversed(devices)]
    links = [0, *reversed(borders or [0] * (len(row) - 1)), 0]
    edges = [(left, left + 1, kind, links[left + 1], links[left]) for left, kind in enumerate(row)]
    taken = np.eye(len(groups), dtype=np.int64)[row]
    available = np.vstack([np.zeros_like(taken[:1]), np.cumsum(taken, axis=0)])
    return make_orders(edges, available, [0], [len(row)], complete=False)


def _in_order(groups: Groups, devices: Sequence[int]) -> Orders:
    """One order of devices, of which any may be left out."""
    of = {device: index for index, group in enumerate(groups) for device in group}
    row = [of[device] for device in reversed(devices)]
    edges = [(rest, state, row[rest], 0, 0) for state in range(1, len(row) + 1) for rest in range(state)]
    taken = np.eye(len(groups), dtype=np.int64)[row]
    available = np.vstack([np.zeros_like(taken[:1]), np.cumsum(taken, axis=0)])
    return make_orders(edges, available, range(len(available)), [len(row)], complete=False)


def devices_of(groups: Groups, types: Sequence[int]) -> tuple[int, ...]:
    """A device for each stage, given their types; of those alike in their order. By positions in the cluster."""
    left = [iter(group) for group in groups]
    return tuple(next(left[kind]) for kind in types)


def device_types(cluster: Cluster) -> tuple[DeviceType, ...]:
    """Group the devices: two devices of a group can be exchanged without changing any cost."""
    groups: dict[Hashable, list[list[int]]] = {}
    paired = {name for link in cluster.links for name in link.between}
    differ = cluster.links_differ
    for index, device in enumerate(cluster.devices):
        # All devices of a host without links of their own are alike: only the others have to be compared.
        own = device.name in paired
        key = (
            *_class(device),
            device.action_seconds,
            device.host_bandwidth,
            device.host if differ else "",
            own,
        )
        alike = groups.setdefault(key, [])
        for group in alike:
            if not own or _same_links(cluster, group[0], index):
                group.append(index)
                break
        else:
            alike.append([index])
    found = sorted(group for alike in groups.values() for group in alike)
    return tuple(DeviceType(*_class(cluster.devices[group[0]]), tuple(group)) for group in found)


def twins_of(cluster: Cluster, types: Sequence[DeviceType]) -> list[tuple[int, ...]]:
    """Return, for each type of device, the types on the host before that is like its own; empty if there is none.

    A pipeline that visits the two hosts in the other order costs the same. Hosts with links of single pairs are like no
    other.
    """
    paired = {name for link in cluster.links for name in link.between}
    hosts: dict[str, list[int]] = {}
    for number, kind in enumerate(types):
        hosts.setdefault(cluster.devices[kind.devices[0]].host, []).append(number)
    latest: dict[Hashable, tuple[int, ...]] = {}
    found: list[tuple[int, ...]] = [()] * len(types)
    for host, own in hosts.items():
        if not host or any(
            cluster.devices[at].name in paired for number in own for at in types[number].devices
        ):
            continue
        shape = sorted((types[n].kind, types[n].speed, types[n].memory, len(types[n].devices)) for n in own)
        key = host.rpartition("/")[0], tuple(shape)
        for number in own:
            found[number] = latest.get(key, ())
        latest[key] = tuple(own)
    return found


def distinct_orders(cluster: Cluster, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield orders of ``devices`` devices, the cluster's own first; one for all that cost the same.

    Devices of one type may change places, and hosts that are alike, too.
    """
    types = device_types(cluster)
    twins = twins_of(cluster, types)

    # The hosts that are like a type's own and come next: open to a pipeline that has entered this one.
    following: list[list[int]] = [[] for _ in types]
    for number, earlier in enumerate(twins):
        for other in earlier:
            following[other].append(number)
    first = frozenset(number for number, earlier in enumerate(twins) if not earlier)

    def choices(used: dict[int, int], open_types: frozenset[int]) -> Iterator[tuple[int, int]]:
        """Return the next device of each type that is open, in the cluster's order."""
        free = (number for number in open_types if used.get(number, 0) < len(types[number].devices))
        return iter(sorted((types[number].devices[used.get(number, 0)], number) for number in free))

    # Depth first, without recursion: there may be thousands of devices. One entry for each device that is taken.
    taken: list[int] = []
    stack = [(choices({}, first), dict[int, int](), first)]
    while stack:
        left, used, open_types = stack[-1]
        if len(taken) == devices:
            yield tuple(taken)
            following_choice = None
        else:
            following_choice = next(left, None)
        if following_choice is None:
            stack.pop()
            if taken:
                taken.pop()
            continue
        device, number = following_choice
        taken.append(device)
        now = {**used, number: used.get(number, 0) + 1}
        opened = open_types.union(following[number])
        stack.append((choices(now, opened), now, opened))


def number_links(cluster: Cluster, types: Sequence[DeviceType]) -> tuple[Ints | None, tuple[Link, ...]]:
    """Return the number of the link between devices of each two types, [types, types], and the links.

    The numbers are None if all links are alike.
    """
    if not cluster.links_differ:
        return None, (cluster.link,)
    numbers: dict[tuple[float | None, float], int] = {}
    table = np.zeros((len(types), len(types)), dtype=np.int64)
    links: list[Link] = []
    for row, one in enumerate(types):
        for column, other in enumerate(types):
            # Two devices of one type are different ones.
            names = cluster.devices[one.devices[0]].name, cluster.devices[other.devices[-1]].name
            link = cluster.link_between(*names)
            table[row, column] = numbers.setdefault((link.message_bandwidth, link.latency), len(links))
            if len(numbers) > len(links):
                links.append(link)
    return table, tuple(links)


def _class(device: Device) -> tuple[str, float, float]:
    limit = math.inf if device.memory_bytes is None else device.memory_bytes
    return device.kind, device.speed, limit


def _same_links(cluster: Cluster, one: int, other: int) -> bool:
    a, b = cluster.devices[one].name, cluster.devices[other].name
    # Of three that are alike, all pairs have the same link.
    others = [device.name for device in cluster.devices if device.name not in (a, b)]
    pairs = [(cluster.link_between(a, name), cluster.link_between(b, name)) for name in others]
    return all((x.message_bandwidth, x.latency) == (y.message_bandwidth, y.latency) for x, y in pairs)


def _link(links: Ints | None, one: int, other: int) -> int:
    return 0 if links is None or NOBODY in (one, other) else int(links[one, other])


def _steps(
    groups: Groups,
    state: tuple[tuple[int, ...], int, int],
    last: bool,
    links: bool,
    earlier: Sequence[Sequence[int]],
) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Type of the next stage, how many of each type are taken with it, and the type that comes before it."""
    taken, _, announced = state
    for kind in [announced] if links else range(len(groups)):
        if taken[kind] == len(groups[kind]):
            continue
        now = (*taken[:kind], taken[kind] + 1, *taken[kind + 1 :])
        if not links or last:
            yield kind, now, NOBODY
            continue
        for before in range(len(groups)):
            first = earlier[before]
            if now[before] < len(groups[before]) and (not first or any(now[kind] for kind in first)):
                yield kind, now, before


def make_orders(
    edges: Sequence[tuple[int, ...]],
    available: Ints,
    ends: Sequence[int],
    full: Sequence[int],
    *,
    complete: bool,
) -> Orders:
    """Return the orders with these edges: rest, state, type, and the links before and behind."""
    table = np.array(sorted(edges, key=lambda edge: edge[1]), dtype=np.int64).reshape(-1, 5)
    rest, state, kind, before, after = table.T
    return Orders(
        rest, state, kind, before, after, available, np.array(ends), np.array(full), complete
    )  # fmt: skip
