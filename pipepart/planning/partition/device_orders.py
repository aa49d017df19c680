"""The device-state graph of the chain search: which devices the stages behind a border have taken.

A state counts the devices of each type that later stages use. An edge adds one stage in front of them. If links differ,
the cost of a border depends on both of its devices: a state then also has the type of the front device, and the type
of the device that comes before it. All arrays have one entry an edge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster

Ints = NDArray[np.int64]

NOBODY = -1


@dataclass(frozen=True)
class DeviceType:
    """Devices that are alike: speed, memory in bytes (infinite for no limit), and positions in the cluster."""

    speed: float
    memory: float
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Orders:
    """The edges of the walk, those that lead to one state side by side.

    Attributes:
        types: the devices.
        source, target: state behind the new stage, and state with it.
        type: of the device that the new stage is on.
        before, behind: types of the devices of its neighbours; -1 for none, and where all links are alike.
        left: number of stages from the new one to the end, from 1 on.
        states: how many.
        starts: states without any stage.
        finals: states with all stages.
        complete: whether every order of the devices is a walk.
    """

    types: tuple[DeviceType, ...]
    source: Ints
    target: Ints
    type: Ints
    before: Ints
    behind: Ints
    left: Ints
    states: int
    starts: Ints
    finals: Ints
    complete: bool


def device_types(cluster: Cluster) -> tuple[DeviceType, ...]:
    """The devices in groups of which any two could be exchanged."""
    groups: list[list[int]] = []
    for index in range(len(cluster)):
        for group in groups:
            if _alike(cluster, group[0], index):
                group.append(index)
                break
        else:
            groups.append([index])
    first = [cluster.devices[group[0]] for group in groups]
    return tuple(
        DeviceType(
            device.speed, math.inf if device.memory_bytes is None else device.memory_bytes, tuple(group)
        )
        for device, group in zip(first, groups, strict=True)
    )


def distinct_orders(cluster: Cluster, devices: int) -> Iterator[tuple[int, ...]]:
    """Orders of so many devices, the cluster's own first; of those that exchange devices that are alike, one."""
    types = device_types(cluster)
    of = [0] * len(cluster)
    for number, kind in enumerate(types):
        for device in kind.devices:
            of[device] = number

    def extended(taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(taken) == devices:
            yield taken
            return
        seen: set[int] = set()
        for device in range(len(cluster)):
            if device not in taken and of[device] not in seen:
                seen.add(of[device])
                yield from extended((*taken, device))

    return extended(())


def all_orders(cluster: Cluster, stages: int, most_edges: float = math.inf) -> Orders:
    """Every way to put so many stages on devices of the cluster.

    Eight unlike devices have 1,024 edges, and 10,864 with unlike links. If there are more edges than ``most_edges``,
    the graph has the cluster's own order alone and is not ``complete``.
    """
    types = device_types(cluster)
    found = _walk(types, stages, bool(cluster.links), math.inf if len(types) == 1 else most_edges)
    return found or given_order(cluster, range(len(cluster))[:stages])


def given_order(cluster: Cluster, devices: Sequence[int]) -> Orders:
    """One order of devices, by their positions in the cluster."""
    types = device_types(cluster)
    of = {device: index for index, kind in enumerate(types) for device in kind.devices}
    row = [of[device] for device in reversed(devices)]
    links = bool(cluster.links)
    edges = [
        (
            index,
            index + 1,
            kind,
            row[index + 1] if links and index + 1 < len(row) else NOBODY,
            row[index - 1] if links and index else NOBODY,
            index + 1,
        )
        for index, kind in enumerate(row)
    ]
    return _orders(types, edges, len(row) + 1, [0], [len(row)], complete=False)


def devices_of(orders: Orders, types: Sequence[int]) -> tuple[int, ...]:
    """A device, by its position in the cluster, for each stage, given their types: of those alike in their order."""
    left = [iter(kind.devices) for kind in orders.types]
    return tuple(next(left[kind]) for kind in types)


def _alike(cluster: Cluster, one: int, other: int) -> bool:
    a, b = cluster.devices[one], cluster.devices[other]
    if (a.kind, a.speed, a.memory_bytes) != (b.kind, b.speed, b.memory_bytes):
        return False
    others = [device.name for device in cluster.devices if device.name not in (a.name, b.name)]
    return not cluster.links or all(
        _same(cluster, (a.name, name), (b.name, name)) for name in others
    )  # of three that are alike, all pairs have the same link


def _same(cluster: Cluster, one: tuple[str, str], other: tuple[str, str]) -> bool:
    a, b = cluster.link_between(*one), cluster.link_between(*other)
    return (a.bandwidth, a.latency) == (b.bandwidth, b.latency)


def _walk(types: tuple[DeviceType, ...], stages: int, links: bool, most_edges: float) -> Orders | None:
    """The graph of every order; None if it has more than ``most_edges`` edges."""
    number: dict[tuple[tuple[int, ...], int, int], int] = {}
    edges: list[tuple[int, int, int, int, int, int]] = []
    nothing = (0,) * len(types)
    level = [(nothing, NOBODY, first) for first in (range(len(types)) if links else [NOBODY])]
    for state in level:
        number[state] = len(number)
    starts = list(number.values())
    for left in range(1, stages + 1):
        reached: dict[tuple[tuple[int, ...], int, int], None] = {}
        for state in level:
            for kind, taken, after in _steps(types, state, left == stages, links):
                target = (taken, kind if links else NOBODY, after)
                reached[target] = None
                edges.append(
                    (number[state], number.setdefault(target, len(number)), kind, after, state[1], left)
                )
            if len(edges) > most_edges:
                return None
        level = list(reached)
    return _orders(types, edges, len(number), starts, [number[state] for state in level], complete=True)


def _steps(
    types: Sequence[DeviceType], state: tuple[tuple[int, ...], int, int], last: bool, links: bool
) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Type of the next stage, how many of each type are taken with it, and the type that comes before it."""
    taken, _, announced = state
    for kind in [announced] if links else range(len(types)):
        if taken[kind] == len(types[kind].devices):
            continue
        now = (*taken[:kind], taken[kind] + 1, *taken[kind + 1 :])
        if not links or last:
            yield kind, now, NOBODY
            continue
        for before, kinds in enumerate(types):
            if now[before] < len(kinds.devices):
                yield kind, now, before


def _orders(
    types: tuple[DeviceType, ...],
    edges: Sequence[tuple[int, ...]],
    states: int,
    starts: Sequence[int],
    finals: Sequence[int],
    *,
    complete: bool,
) -> Orders:
    table = np.array(sorted(edges, key=lambda edge: edge[1]), dtype=np.int64).reshape(-1, 6)
    source, target, kind, before, behind, left = table.T
    return Orders(
        types, source, target, kind, before, behind, left, states,
        np.array(starts, dtype=np.int64), np.array(finals, dtype=np.int64), complete,
    )  # fmt: skip
