"""Problem: a layer graph and its devices as arrays; Split: a cut of the graph.

Nodes are 0, 1, ... in a topological order. A tensor is a *net* (a hyperedge): its *pins* are the node that makes it and
the nodes that use it. The load of a stage S on a device is the seconds of its nodes there plus the seconds of each net
with a pin in S and a pin outside of S. So a tensor costs its seconds once in the stage that makes it and once in each
other stage that uses it, and nothing in stages between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .device_orders import Orders, all_orders, devices_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Memory in bytes of a device without a limit: more than any graph needs, and small enough for sums in 64 bits.
UNLIMITED = 2**60

# With more edges between device states, only the cluster's order of devices is searched. Ten devices of different types
# have 5,120 edges.
MOST_EDGES = 5500


@dataclass(frozen=True)
class Net:
    """A tensor: the seconds to move it over the border of one device, and the nodes that make or use it, ascending."""

    seconds: float
    pins: tuple[int, ...]


@dataclass(frozen=True)
class DeviceType:
    """Interchangeable devices.

    Attributes:
        seconds: seconds of each node, [nodes]; infinite for nodes that may not run on this type.
        pays: whether transfers count in the load of its stages.
        memory: bytes of memory of each device.
        devices: their positions in the cluster.
    """

    seconds: Floats
    pays: bool
    memory: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A graph to cut, and the devices.

    Attributes:
        successors: successors of each node, which have higher numbers.
        bytes: memory of each node, [nodes].
        nets: the tensors, each with at least two pins.
        types: the devices by type.
    """

    successors: tuple[tuple[int, ...], ...]
    bytes: Ints
    nets: tuple[Net, ...]
    types: tuple[DeviceType, ...]

    def __len__(self) -> int:
        return len(self.successors)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Predecessors of each node, which have lower numbers."""
        before: list[list[int]] = [[] for _ in self.successors]
        for node, after in enumerate(self.successors):
            for successor in after:
                before[successor].append(node)
        return tuple(map(tuple, before))

    @cached_property
    def device_weights(self) -> Floats:
        """Work per second of each device type, [types], at most 1.

        The work of a node is the minimum over the types of its seconds times the weight of the type. So a device does
        at most ``weight x T`` of work in T seconds. For any weights, the bottleneck is at least all work divided by the
        sum of the weights of all devices. The weight of a type is the sum of the minimum seconds over all types divided
        by the sum of its own seconds, over the nodes that it may run. If types differ only in speed, this is the speed.
        The best weights, from a linear program, gave no better bounds and no faster searches for types whose seconds
        differ by random factors up to 4.
        """
        weights = np.zeros(len(self.types))
        shortest = np.min([device_type.seconds for device_type in self.types], axis=0)
        for index, device_type in enumerate(self.types):
            allowed = np.isfinite(device_type.seconds)
            total = float(device_type.seconds[allowed].sum())
            if allowed.any():
                weights[index] = float(shortest[allowed].sum()) / total if total else 1.0
        return weights / weights.max() if weights.any() else np.ones(len(weights))

    @cached_property
    def work(self) -> Floats:
        """Work of each node, [nodes]: the minimum of its weighted seconds over the types that may run it."""
        products = [
            np.where(
                np.isfinite(device_type.seconds),
                np.nan_to_num(device_type.seconds, posinf=0.0) * weight,
                np.inf,
            )
            for device_type, weight in zip(self.types, self.device_weights, strict=True)
        ]
        return np.min(products, axis=0)

    @cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """The nets that each node is a pin of."""
        numbers: list[list[int]] = [[] for _ in self.successors]
        for number, net in enumerate(self.nets):
            for pin in net.pins:
                numbers[pin].append(number)
        return tuple(map(tuple, numbers))

    def spanning_seconds(self, low: int, high: int) -> float:
        """Return the seconds of the nets with a pin before node ``low`` and a pin at node ``high`` or later."""
        firsts, lasts, seconds = self._net_ends
        return float(seconds[(firsts < low) & (lasts >= high)].sum())

    @cached_property
    def _net_ends(self) -> tuple[Ints, Ints, Floats]:
        firsts = np.array([net.pins[0] for net in self.nets], dtype=np.int64)
        lasts = np.array([net.pins[-1] for net in self.nets], dtype=np.int64)
        return firsts, lasts, np.array([net.seconds for net in self.nets])

    @cached_property
    def orders(self) -> Orders:
        """Orders of the devices, in which any device may be left out."""
        groups = [device_type.devices for device_type in self.types]
        return all_orders(groups, self.device_count, leave_out=True, most_edges=MOST_EDGES)

    def devices_of(self, split: Split) -> tuple[int, ...]:
        """Return the cluster position of each stage's device; devices of one type are used in cluster order."""
        return devices_of([device_type.devices for device_type in self.types], split.types)

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return sum(len(device_type.devices) for device_type in self.types)

    def stage_seconds(self, nodes: Iterable[int], device_type: DeviceType) -> float:
        """Return the load in seconds of a stage with these nodes: compute, and each net that it cuts once."""
        inside = set(nodes)
        compute = [float(device_type.seconds[node]) for node in inside]
        if not device_type.pays:
            return math.fsum(compute)
        touched = {number for node in inside for number in self.nets_of[node]}
        moved = [
            self.nets[number].seconds for number in touched if not inside.issuperset(self.nets[number].pins)
        ]
        return math.fsum(compute + moved)


@dataclass(frozen=True)
class Split:
    """A cut of a problem: the stage of each node, and the index of the device type of each stage."""

    stage_of: tuple[int, ...]
    types: tuple[int, ...]

    @property
    def stages(self) -> list[list[int]]:
        """The nodes of each stage."""
        stages: list[list[int]] = [[] for _ in self.types]
        for node, stage in enumerate(self.stage_of):
            stages[stage].append(node)
        return stages

    def bottleneck(self, problem: Problem) -> float:
        """Return the largest load of any stage, in seconds."""
        return max(
            problem.stage_seconds(nodes, problem.types[device_type])
            for nodes, device_type in zip(self.stages, self.types, strict=True)
        )


def tidy_nets(nets: Iterable[Net]) -> tuple[Net, ...]:
    """Return the nets that a border can cut, with nets of equal pins merged into one net."""
    seconds: dict[tuple[int, ...], list[float]] = {}
    for net in nets:
        pins = tuple(sorted(set(net.pins)))
        if len(pins) > 1 and net.seconds > 0:
            seconds.setdefault(pins, []).append(net.seconds)
    return tuple(Net(math.fsum(parts), pins) for pins, parts in sorted(seconds.items()))
