"""Prices layouts: the seconds, delays and bytes of their stages, as the dispatcher takes them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schedules.searching.dispatching import Room, Work

from ..costs.stage_memory import Recompute
from .layout import Layout
from .request import JointRequest


class _Bytes(NamedTuple):
    """Bytes of one stage; the last three for each micro-batch."""

    static: float
    transient: float
    stash: float
    boundary: float
    deferred: float


class Pricing:
    """The costs of every stage that a layout may have, with what was computed once.

    Args:
        request: has the layers, devices and links.
    """

    def __init__(self, request: JointRequest) -> None:
        costs, cluster = request.costs, request.groups.cluster
        self._costs = costs
        self.micro_batches, self.layers = request.micro_batches, costs.layers
        self._forward, self._input, self._weight, self._split = costs.sums.tolist()
        self.split_costs = costs.split is not None and bool((costs.split > 0).any())
        self._output = costs.output_bytes.tolist()
        self._has_backward = costs.has_backward.tolist()
        self.speeds = [device.speed for device in cluster.devices]
        names = [device.name for device in cluster.devices]
        links = [[cluster.link_between(one, other) for other in names] for one in names]
        self._latency = [[link.latency for link in row] for row in links]
        self._per_byte = [[1 / link.bandwidth if link.bandwidth else 0.0 for link in row] for row in links]
        limits = [device.memory_bytes for device in cluster.devices]
        self.limits = [math.inf if limit is None else float(limit) for limit in limits]
        self.limited = any(limit is not None for limit in limits)
        self._bytes: dict[tuple[int, int], _Bytes] = {}

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.speeds)

    def trains(self, end: int) -> bool:
        """Return whether a stage that ends before this layer has a backward."""
        return self._has_backward[end - 1]

    def loads(self, layout: Layout) -> list[float]:
        """Return the seconds of each device for one micro-batch, with whole backwards or their parts."""
        found = [0.0] * self.devices
        for (start, end), device, fused, mode in zip(
            pairwise((0, *layout.borders, self.layers)),
            layout.devices,
            layout.fused,
            layout.modes,
            strict=True,
        ):
            forward = self._forward[end] - self._forward[start]
            seconds = (
                forward + self._input[end] - self._input[start] + self._weight[end] - self._weight[start]
            )
            if not fused:
                seconds += self._split[end] - self._split[start]
            if mode != "never":
                seconds += forward
            found[device] += seconds / self.speeds[device]
        return found

    def work(self, layout: Layout) -> Work | None:
        """Return the operations of a layout; None if one micro-batch does not fit its device."""
        m, stages = self.micro_batches, layout.stages
        forwards, inputs, weights = [], [], []
        edges = (0, *layout.borders, self.layers)
        for at, device in enumerate(layout.devices):
            start, end, speed = edges[at], edges[at + 1], self.speeds[device]
            forwards.append((self._forward[end] - self._forward[start]) / speed)
            for_input = (self._input[end] - self._input[start]) / speed
            for_weight = (self._weight[end] - self._weight[start]) / speed
            whole = for_input + for_weight
            if layout.fused[at]:
                inputs.append(whole)
                weights.append(0.0)
                continue
            factor = max(0.0, 1 + (self._split[end] - self._split[start]) / speed / whole) if whole else 1.0
            inputs.append(for_input * factor)
            weights.append(for_weight * factor)
        ahead, back = [0.0] * stages, [0.0] * stages
        for at in range(1, stages):
            one, other = layout.devices[at - 1], layout.devices[at]
            if one != other:
                size = self._output[edges[at] - 1]
                ahead[at] = self._latency[one][other] + size * self._per_byte[one][other]
                back[at - 1] = self._latency[other][one] + size * self._per_byte[other][one]
        again = [self._again(mode) for mode in layout.modes]
        before = []
        if any(again):
            repeated = [
                seconds * (k < count)
                for seconds, count in zip(forwards, again, strict=True)
                for k in range(m)
            ]
            before = [0.0] * len(repeated) + repeated
        room = None
        if self.limited:
            room = self._room(layout, again)
            if room is None:
                return None
        return Work(
            devices=self.devices,
            micro_batches=m,
            device_of=layout.devices,
            seconds=[seconds for seconds in (*forwards, *inputs, *weights) for _ in range(m)],
            before=before,
            delay_forward=ahead,
            delay_backward=back,
            fused=layout.fused,
            room=room,
        )

    def stage_bytes(self, start: int, end: int) -> _Bytes:
        """Return the bytes of the stage of layers ``start`` to ``end``; what waits for skips is not counted."""
        found = self._bytes.get((start, end))
        if found is None:
            sizes = self._costs.sizes(slice(start, end))
            kept = sizes.per_micro_batch[0, 0].tolist()
            found = _Bytes(float(sizes.static[0, 0]), float(sizes.transient[0, 0]), *kept)
            self._bytes[start, end] = found
        return found

    def _again(self, mode: Recompute) -> int:
        """How many micro-batches, the first ones, a stage recomputes."""
        return {"never": 0, "except-last": self.micro_batches - 1, "always": self.micro_batches}[mode]

    def _room(self, layout: Layout, again: list[int]) -> Room | None:
        """The memory; None if a device has not enough for one micro-batch."""
        m, edges = self.micro_batches, (0, *layout.borders, self.layers)
        sizes = [self.stage_bytes(start, end) for start, end in pairwise(edges)]
        if self._costs.skips:
            waiting = self._costs.skips.waiting_of(np.array([layout.borders], dtype=np.int64))[0].tolist()
            sizes = [
                size._replace(stash=size.stash + more, boundary=size.boundary + more)
                if self.trains(end)
                else size
                for size, more, end in zip(sizes, waiting, edges[1:], strict=True)
            ]
        limit, transient = list(self.limits), [0.0] * self.devices
        for device, size in zip(layout.devices, sizes, strict=True):
            limit[device] -= size.static
            transient[device] = max(transient[device], size.transient)
        limit = [room - more for room, more in zip(limit, transient, strict=True)]
        stash: list[float] = []
        during: list[float] = []
        deferred: list[float] = []
        most = [0.0] * self.devices  # that one operation of a device keeps besides while it runs
        for device, size, count, fused in zip(layout.devices, sizes, again, layout.fused, strict=True):
            left = 0.0 if fused else size.deferred
            # What I leaves may be more than the stash before it. It is then counted from the forward on.
            stash += [max(size.boundary, left)] * count + [max(size.stash, left)] * (m - count)
            during += [max(size.stash - max(size.boundary, left), 0.0)] * count + [0.0] * (m - count)
            deferred += [left] * m
            most[device] = max(most[device], during[-m])
        needs, later = [0.0] * layout.stages, [0.0] * self.devices
        for stage in reversed(range(layout.stages)):
            device, first = layout.devices[stage], stage * m
            later[device] += max(stash[first], stash[first + m - 1])
            needs[stage] = later[device] + most[device]
            if needs[stage] > limit[device] * (1 + 1e-9):
                return None
        return Room(limit, stash, during, deferred, needs)
