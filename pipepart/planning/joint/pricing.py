"""Prices layouts: the seconds, delays and bytes of their stages, as the dispatcher takes them."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schedules.searching.problem import Memory, Problem

from ..costs.stage_memory import Mode, least_memory
from ..plans.stage_plan import StagePlan, copy_seconds
from .layout import Layout
from .request import JointRequest


class _Bytes(NamedTuple):
    """Bytes of one stage; those from the stash on for each micro-batch."""

    static: float
    replicas: float
    stash: float
    boundary: float
    deferred: float
    input: float
    gradient: float
    workspace: tuple[float, float, float]
    workspace_whole: tuple[float, float, float]


class Pricing:
    """The costs of every stage that a layout may have, with what was computed once.

    Args:
        request: has the layers, devices and links.
    """

    def __init__(self, request: JointRequest) -> None:
        costs, cluster = request.costs, request.groups.cluster
        self._costs, self._cluster = costs, cluster
        self._replicas = request.groups.replicas
        self.micro_batches, self.layers = request.micro_batches, costs.layers
        self._forward, self._input, self._weight, self._split = costs.sums.tolist()
        self._split_costs = costs.split is not None and bool((costs.split > 0).any())
        self._compute = costs.compute_sums.tolist()
        self._output = costs.output_bytes.tolist()
        self._has_backward = costs.has_backward.tolist()
        self.speeds = [device.speed for device in cluster.devices]
        self._action = [device.action_seconds for device in cluster.devices]
        limits = [device.memory_bytes for device in cluster.devices]
        self._limits = [math.inf if limit is None else float(limit) for limit in limits]
        self.limited = costs.may_exceed(least_memory(cluster))
        self._stage_bytes = cache(self._bytes_of)
        self._copy_seconds = cache(self._copy_seconds_of)
        self._link = cache(self._link_between)

    @property
    def whole_helps(self) -> bool:
        """Whether whole backwards can save seconds, or memory that waits for W."""
        return self._split_costs or self.limited or any(self._action)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.speeds)

    def trains(self, end: int) -> bool:
        """Return whether a stage that ends before this layer has a backward."""
        return self._has_backward[end - 1]

    def device_kinds(self) -> list[int]:
        """Return a number for each device; equal ones if the devices and all their links are alike."""
        differ = self._cluster.links_differ
        keys = [
            (device.speed, device.memory_bytes, device.action_seconds, device.host_bandwidth, at * differ)
            for at, device in enumerate(self._cluster.devices)
        ]
        numbers = {key: at for at, key in reversed(list(enumerate(keys)))}
        return [numbers[key] for key in keys]

    def seconds(self, start: int, end: int, device: int) -> float:
        """Return what layers add to the load of a device for one micro-batch."""
        return (self._compute[end] - self._compute[start]) / self.speeds[device]

    def loads(self, layout: Layout) -> list[float]:
        """Return the seconds of each device for one micro-batch, without recomputes."""
        loads, edges = [0.0] * self.devices, (0, *layout.borders, self.layers)
        for at, (device, whole) in enumerate(zip(layout.devices, layout.whole, strict=True)):
            actions = self._action[device] * (2 if whole else 3)
            loads[device] += self.seconds(edges[at], edges[at + 1], device) + actions
        return loads

    def problem(self, layout: Layout) -> Problem:
        """Return the operations of a layout."""
        m, stages = self.micro_batches, layout.stages
        forwards, inputs, weights, again = [], [], [], []
        edges = (0, *layout.borders, self.layers)
        for at, device in enumerate(layout.devices):
            start, end, speed = edges[at], edges[at + 1], self.speeds[device]
            action = self._action[device]
            forward = (self._forward[end] - self._forward[start]) / speed + action
            for_input = (self._input[end] - self._input[start]) / speed
            for_weight = (self._weight[end] - self._weight[start]) / speed
            backward = for_input + for_weight
            if layout.whole[at]:
                for_input, for_weight = backward + action, 0.0
            else:
                extra = (self._split[end] - self._split[start]) / speed
                factor = max(0.0, 1 + extra / backward) if backward else 1.0
                for_input, for_weight = for_input * factor + action, for_weight * factor + action
            again.append(forward)
            if layout.modes[at] == "offload":
                # Each copy runs beside one other action of the device, which may take less time.
                beside, busy = self._copy_seconds(start, end, device)
                forward += busy + action + max(0.0, beside - forward)
                for_input += busy + action + max(0.0, beside - for_input)
            forwards.append(forward)
            inputs.append(for_input)
            weights.append(for_weight)
        ahead, back, hold_ahead, hold_back = ([0.0] * stages for _ in range(4))
        for at in range(1, stages):
            source, target = layout.devices[at - 1], layout.devices[at]
            if source != target:
                size = self._output[edges[at] - 1]
                latency, per_byte = self._link(source, target)
                latency_back, per_byte_back = self._link(target, source)
                hold_ahead[at], hold_back[at - 1] = size * per_byte, size * per_byte_back
                ahead[at] = latency + hold_ahead[at]
                back[at - 1] = latency_back + hold_back[at - 1]
        return Problem(
            devices=self.devices,
            micro_batches=m,
            device_of=layout.devices,
            forward=forwards,
            backward_input=inputs,
            backward_weight=weights,
            whole=layout.whole,
            recompute=again,
            recomputed=[self._recomputed(mode) for mode in layout.modes],
            delay_forward=ahead,
            delay_backward=back,
            hold_forward=hold_ahead,
            hold_backward=hold_back,
            memory=self._memory(layout) if self.limited else None,
        )

    def _recomputed(self, mode: Mode) -> int:
        """Return how many micro-batches, the first ones, a stage recomputes."""
        return {"except-last": self.micro_batches - 1, "always": self.micro_batches}.get(mode, 0)

    def _memory(self, layout: Layout) -> Memory:
        """Return the memory by the formula of :mod:`..costs.stage_memory`."""
        edges, devices = (0, *layout.borders, self.layers), layout.devices
        sizes = [self._stage_bytes(start, end) for start, end in pairwise(edges)]
        if self._costs.skips:
            waiting = self._costs.skips.waiting_of(np.array([layout.borders], dtype=np.int64))[0].tolist()
            sizes = [
                size._replace(stash=size.stash + more, boundary=size.boundary + more)
                if self.trains(end)
                else size
                for size, more, end in zip(sizes, waiting, edges[1:], strict=True)
            ]
        limit, replicas = list(self._limits), [0.0] * self.devices
        for device, size in zip(devices, sizes, strict=True):
            limit[device] -= size.static
            replicas[device] += size.replicas
        offloads = [mode == "offload" for mode in layout.modes]
        return Memory(
            # When all backwards have run, a device has the gradients of the other replicas.
            limit=[room if room >= more else -1.0 for room, more in zip(limit, replicas, strict=True)],
            stash=[
                size.boundary if offload else size.stash for size, offload in zip(sizes, offloads, strict=True)
            ],
            deferred=[size.deferred for size in sizes],
            boundary=[size.boundary for size in sizes],
            # A stash is there during its own F or I, and while one other operation runs.
            copied=[
                2 * (size.stash - size.boundary) * offload for size, offload in zip(sizes, offloads, strict=True)
            ],
            inputs=[
                size.input if at and devices[at - 1] != devices[at] else 0.0 for at, size in enumerate(sizes)
            ],
            gradients=[
                size.gradient if after != device else 0.0
                for size, device, after in zip(sizes, devices, (*devices[1:], devices[-1]), strict=True)
            ],
            workspace=[
                size.workspace_whole if whole else size.workspace
                for size, whole in zip(sizes, layout.whole, strict=True)
            ],
        )

    def _bytes_of(self, start: int, end: int) -> _Bytes:
        """Return the bytes of the stage of layers ``start`` to ``end``; what waits for skips is not counted."""
        sizes = self._costs.sizes(slice(start, end))
        forward, whole, for_input, for_weight, _ = sizes.transient[0, 0].tolist()
        return _Bytes(
            float(sizes.static[0, 0]),
            float((self._replicas - 1) * sizes.version[0, 0]),
            *sizes.per_micro_batch[0, 0].tolist(),
            *sizes.messages[0, 0].tolist(),
            (forward, for_input, for_weight),
            (forward, whole, 0.0),
        )

    def _copy_seconds_of(self, start: int, end: int, device: int) -> tuple[float, float]:
        """Return the seconds that a copy of a stage's stash to the host takes beside the device's work, and of it."""
        size = self._stage_bytes(start, end)
        stage = StagePlan.model_construct(
            offload="stash", stash_bytes=size.stash, boundary_bytes=size.boundary
        )
        return copy_seconds(stage, self._cluster.devices[device])

    def _link_between(self, source: int, target: int) -> tuple[float, float]:
        """Return the latency of a link, and the seconds that it takes for each byte."""
        names = [self._cluster.devices[device].name for device in (source, target)]
        link = self._cluster.link_between(*names)
        rate = link.message_bandwidth
        return link.latency, 1 / rate if rate else 0.0
