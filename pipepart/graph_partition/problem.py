"""Problem: a layer graph and its devices as numbers; Split: an answer to it.

Nodes are 0, 1, ... in a topological order. A tensor is a *net* (a hyperedge): its *pins* are the node that makes it and
the nodes that use it. The load of a stage S on a device is the seconds of its nodes there plus the seconds of each net
that S cuts, that is with a pin in S and a pin outside. So a tensor is paid for once by the stage that makes it and once
by each stage that uses it; stages in between do not pay.
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

# Memory of a device without a limit: larger than any graph, and sums of it fit 64 bits.
UNLIMITED = 2**60

# With more edges between the states of the devices, only the cluster's own order of them is searched. Ten different
# devices have 5,120.
MOST_EDGES = 5500


@dataclass(frozen=True)
class Net:
    """A tensor: the seconds to move it over the border of one device, and the nodes that make or use it, ascending."""

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
    """A graph to cut, and the devices.

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
    def device_weights(self) -> Floats:
        """The work that each type of device does in a second, at most 1.

        The work of a node is the least of its seconds times the weight of the type, over the types. So a device does
        at most ``weight x T`` of work in T seconds, and the bottleneck is at least all work over the sum of the weights
        of all devices, whatever the weights. Here a weight is the least seconds of the nodes that the type may run
        over its own: the speed, if types differ in speed only. The best weights, from a linear program, proved no
        more and were no faster on types whose seconds differ by random factors up to 4.
        """
        weights = np.zeros(len(self.types))
        least = np.min([device_type.seconds for device_type in self.types], axis=0)
        for index, device_type in enumerate(self.types):
            allowed = np.isfinite(device_type.seconds)
            own = float(device_type.seconds[allowed].sum())
            if allowed.any():
                weights[index] = float(least[allowed].sum()) / own if own else 1.0
        return weights / weights.max() if weights.any() else np.ones(len(weights))

    @cached_property
    def work(self) -> Floats:
        """The work of each node: its least weighted seconds on any type of device that may run it."""
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
        found: list[list[int]] = [[] for _ in self.successors]
        for number, net in enumerate(self.nets):
            for pin in net.pins:
                found[pin].append(number)
        return tuple(map(tuple, found))

    def spanning_seconds(self, low: int, high: int) -> float:
        """Seconds of the nets with pins before node ``low`` and from node ``high`` on."""
        firsts, lasts, seconds = self._net_ends
        return float(seconds[(firsts < low) & (lasts >= high)].sum())

    @cached_property
    def _net_ends(self) -> tuple[Ints, Ints, Floats]:
        firsts = np.array([net.pins[0] for net in self.nets], dtype=np.int64)
        lasts = np.array([net.pins[-1] for net in self.nets], dtype=np.int64)
        return firsts, lasts, np.array([net.seconds for net in self.nets])

    @cached_property
    def orders(self) -> Orders:
        """The orders of the devices; any of them may be left out."""
        groups = [device_type.devices for device_type in self.types]
        return all_orders(groups, self.device_count, leave_out=True, most_edges=MOST_EDGES)

    def devices_of(self, split: Split) -> tuple[int, ...]:
        """The device of each stage, by its position in the cluster; of those alike in the cluster's order."""
        return devices_of([device_type.devices for device_type in self.types], split.types)

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return sum(len(device_type.devices) for device_type in self.types)

    def stage_seconds(self, nodes: Iterable[int], device_type: DeviceType) -> float:
        """The load of these nodes as one stage: compute, and each net that it cuts, once."""
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
            problem.stage_seconds(nodes, problem.types[device_type])
            for nodes, device_type in zip(self.stages, self.types, strict=True)
        )


def tidy_nets(nets: Iterable[Net]) -> tuple[Net, ...]:
    """Return the nets, merged if their pins are equal, without those that no border can cut."""
    seconds: dict[tuple[int, ...], list[float]] = {}
    for net in nets:
        pins = tuple(sorted(set(net.pins)))
        if len(pins) > 1 and net.seconds > 0:
            seconds.setdefault(pins, []).append(net.seconds)
    return tuple(Net(math.fsum(parts), pins) for pins, parts in sorted(seconds.items()))
