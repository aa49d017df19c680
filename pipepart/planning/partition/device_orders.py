"""The device-state graph of the cut searches: which devices the stages from a border to the end may use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster

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
    devices: a state then also has the type of its front device, and that of the device before it. ::

        no device ──a──► {a} ──b──► {a, b}      two unlike devices: the order b a is one walk,
            └─────b──► {b} ──a────┘             the order a b the other

    Attributes:
        rest, state: the states of each edge; ``rest`` has the lower number. Edges to one state are side by side.
        type: of the device that the new stage is on.
        before, after: types of the devices of its neighbours; -1 for none, and where all links are alike.
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
    groups: Groups, stages: int, *, links: bool = False, leave_out: bool = False, most_edges: float = math.inf
) -> Orders:
    """Return every way to put ``stages`` stages on devices; only the cluster's order if there are too many edges.

    Eight unlike devices have 1,024 edges, and 10,864 with unlike links.

    Args:
        groups: the devices of each type, by their positions in the cluster.
        stages: their number.
        links: whether the link of a border depends on the types of its devices.
        leave_out: whether there may also be fewer stages. Not together with ``links``.
        most_edges: above it the result is :func:`given_order`, unless there is one type only.
    """
    level = [((0,) * len(groups), NOBODY, first) for first in (range(len(groups)) if links else [NOBODY])]
    number = {state: index for index, state in enumerate(level)}
    ends = list(number.values())
    edges: list[tuple[int, ...]] = []
    for left in range(1, stages + 1):
        reached: dict[tuple[tuple[int, ...], int, int], None] = {}
        for state in level:
            for kind, taken, before in _steps(groups, state, left == stages, links):
                target = (taken, kind if links else NOBODY, before)
                reached[target] = None
                edges.append((number[state], number.setdefault(target, len(number)), kind, before, state[1]))
            if len(groups) > 1 and len(edges) > most_edges:
                devices = range(sum(map(len, groups)))[:stages]
                return given_order(groups, devices, links=links, leave_out=leave_out)
        level = list(reached)
    available = np.array([taken for taken, _, _ in number])
    full = [number[state] for state in level]
    return _orders(edges, available, range(len(number)) if leave_out else ends, full, complete=True)


def given_order(
    groups: Groups, devices: Sequence[int], *, links: bool = False, leave_out: bool = False
) -> Orders:
    """One order of devices, by their positions in the cluster: state ``i`` has the last ``i`` of them."""
    of = {device: index for index, group in enumerate(groups) for device in group}
    row = [of[device] for device in reversed(devices)]
    padded = [*row, NOBODY] if links else [NOBODY] * (len(row) + 1)
    edges = [
        (rest, state, row[rest], padded[rest + 1], padded[rest - 1])
        for state in range(1, len(row) + 1)
        for rest in (range(state) if leave_out else [state - 1])
    ]
    taken = np.eye(len(groups), dtype=np.int64)[row]
    available = np.vstack([np.zeros_like(taken[:1]), np.cumsum(taken, axis=0)])
    ends = range(len(available)) if leave_out else [0]
    return _orders(edges, available, ends, [len(row)], complete=False)


def devices_of(groups: Groups, types: Sequence[int]) -> tuple[int, ...]:
    """A device for each stage, given their types; of those alike in their order. By positions in the cluster."""
    left = [iter(group) for group in groups]
    return tuple(next(left[kind]) for kind in types)


def device_types(cluster: Cluster) -> tuple[DeviceType, ...]:
    """Group the devices: two devices of a group can be exchanged without changing any cost."""
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
            device.kind,
            device.speed,
            math.inf if device.memory_bytes is None else device.memory_bytes,
            tuple(group),
        )
        for device, group in zip(first, groups, strict=True)
    )


def distinct_orders(cluster: Cluster, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield orders of ``devices`` devices, the cluster's own first; one for all that differ by devices of one type."""
    of = {device: number for number, kind in enumerate(device_types(cluster)) for device in kind.devices}

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


def _alike(cluster: Cluster, one: int, other: int) -> bool:
    a, b = cluster.devices[one], cluster.devices[other]
    if (a.kind, a.speed, a.memory_bytes) != (b.kind, b.speed, b.memory_bytes):
        return False
    if not cluster.links_differ:
        return True
    # Of three that are alike, all pairs have the same link.
    others = [device.name for device in cluster.devices if device.name not in (a.name, b.name)]
    pairs = [(cluster.link_between(a.name, name), cluster.link_between(b.name, name)) for name in others]
    return all((x.bandwidth, x.latency) == (y.bandwidth, y.latency) for x, y in pairs)


def _steps(
    groups: Groups, state: tuple[tuple[int, ...], int, int], last: bool, links: bool
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
        yield from ((kind, now, before) for before in range(len(groups)) if now[before] < len(groups[before]))


def _orders(
    edges: Sequence[tuple[int, ...]],
    available: Ints,
    ends: Sequence[int],
    full: Sequence[int],
    *,
    complete: bool,
) -> Orders:
    table = np.array(sorted(edges, key=lambda edge: edge[1]), dtype=np.int64).reshape(-1, 5)
    rest, state, kind, before, after = table.T
    return Orders(
        rest, state, kind, before, after, available, np.array(ends), np.array(full), complete
    )  # fmt: skip
