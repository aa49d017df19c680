"""Problem: a layer graph and its devices as numbers, nodes 0, 1, ... in a topological order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .bounds.weights import least, weights

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A device without a limit: no graph comes near, and sums of it stay within 64 bits.
UNLIMITED = 2**60

_Number = TypeVar("_Number", np.float64, np.int64)


@dataclass(frozen=True)
class Net:
    """A tensor: the nodes that make or use it, and the seconds to move it over the border of one device."""

    seconds: float
    pins: tuple[int, ...]


@dataclass(frozen=True)
class DeviceType:
    """Devices that are alike.

    Attributes:
        seconds: of each node; infinite where the node may not run.
        pays: whether tensors that cross its border cost it time.
        memory: bytes of each device.
        devices: their positions in the cluster.
    """

    seconds: Floats
    pays: bool
    memory: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """What is to be cut.

    Attributes:
        successors: of each node, all of them with higher numbers.
        bytes: of each node.
        nets: the tensors, of two pins or more each.
        types: the devices.
    """

    successors: tuple[tuple[int, ...], ...]
    bytes: Ints
    nets: tuple[Net, ...]
    types: tuple[DeviceType, ...]

    def __len__(self) -> int:
        return len(self.successors)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, all of them with lower numbers."""
        found: list[list[int]] = [[] for _ in self.successors]
        for node, after in enumerate(self.successors):
            for other in after:
                found[other].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def worth(self) -> Floats:
        """Work that a second on each type of device is worth, 1 at the most."""
        return weights([kind.seconds for kind in self.types], [len(kind.devices) for kind in self.types])

    @cached_property
    def work(self) -> Floats:
        """Of each node, the least that its seconds on any device are worth."""
        return least([kind.seconds for kind in self.types], self.worth)

    @cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """The nets that each node is a pin of."""
        found: list[list[int]] = [[] for _ in self.successors]
        for number, net in enumerate(self.nets):
            for pin in net.pins:
                found[pin].append(number)
        return tuple(map(tuple, found))

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return sum(len(kind.devices) for kind in self.types)

    def stage_seconds(self, nodes: Iterable[int], kind: DeviceType) -> float:
        """The load of these nodes as one stage: compute, and each tensor that crosses its border, once."""
        inside = set(nodes)
        compute = [float(kind.seconds[node]) for node in inside]
        if not kind.pays:
            return math.fsum(compute)
        touched = {number for node in inside for number in self.nets_of[node]}
        moved = [
            self.nets[number].seconds for number in touched if not inside.issuperset(self.nets[number].pins)
        ]
        return math.fsum(compute + moved)

    def merged(self, group: Sequence[int], count: int) -> Problem:
        """The problem whose node ``group[v]`` holds node ``v``; the groups must be numbered in a topological order."""
        index = np.asarray(group)
        after: list[set[int]] = [set() for _ in range(count)]
        for node, others in enumerate(self.successors):
            after[group[node]].update(group[other] for other in others if group[other] != group[node])
        return replace(
            self,
            successors=tuple(tuple(sorted(others)) for others in after),
            bytes=_summed(self.bytes, index, count),
            nets=tidy_nets(Net(net.seconds, tuple(group[pin] for pin in net.pins)) for net in self.nets),
            types=tuple(replace(kind, seconds=_summed(kind.seconds, index, count)) for kind in self.types),
        )


@dataclass(frozen=True)
class Split:
    """An answer: the stage of each node, and the type of device of each stage, by its index."""

    stage_of: tuple[int, ...]
    types: tuple[int, ...]

    @property
    def stages(self) -> list[list[int]]:
        """The nodes of each stage."""
        found: list[list[int]] = [[] for _ in self.types]
        for node, stage in enumerate(self.stage_of):
            found[stage].append(node)
        return found

    def bottleneck(self, problem: Problem) -> float:
        """The largest load of any stage."""
        return max(
            problem.stage_seconds(nodes, problem.types[kind])
            for nodes, kind in zip(self.stages, self.types, strict=True)
        )


def tidy_nets(nets: Iterable[Net]) -> tuple[Net, ...]:
    """The same tensors, those of the same pins as one, and without those that can never cross a border."""
    seconds: dict[tuple[int, ...], list[float]] = {}
    for net in nets:
        pins = tuple(sorted(set(net.pins)))
        if len(pins) > 1 and net.seconds > 0:
            seconds.setdefault(pins, []).append(net.seconds)
    return tuple(Net(math.fsum(parts), pins) for pins, parts in sorted(seconds.items()))


def _summed(values: NDArray[_Number], index: Ints, count: int) -> NDArray[_Number]:
    total = np.zeros(count, dtype=values.dtype)
    np.add.at(total, index, values)
    return total
