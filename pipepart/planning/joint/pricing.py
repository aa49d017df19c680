"""Prices layouts: the seconds, delays and bytes of their stages, as the dispatcher takes them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schedules.searching.dispatching import Room, Work

from ..costs.stage_memory import Recompute, least_memory
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
        self._split_matters = costs.split is not None and bool((costs.split != 0).any())
        self._split_costs = costs.split is not None and bool((costs.split > 0).any())
        self._compute = costs.compute_sums.tolist()
        self._output = costs.output_bytes.tolist()
        self._has_backward = costs.has_backward.tolist()
        self.speeds = [device.speed for device in cluster.devices]
        self._action = [device.action_seconds for device in cluster.devices]
        names = [device.name for device in cluster.devices]
        links = [[cluster.link_between(one, other) for other in names] for one in names]
        self._links = [
            [(link.latency, link.message_bandwidth) for at, link in enumerate(row) if at != own]
            for own, row in enumerate(links)
        ]
        self._latency = [[link.latency for link in row] for row in links]
        self._per_byte = [
            [1 / rate if (rate := link.message_bandwidth) else 0.0 for link in row] for row in links
        ]
        limits = [device.memory_bytes for device in cluster.devices]
        self.limits = [math.inf if limit is None else float(limit) for limit in limits]
        self._bytes: dict[tuple[int, int], _Bytes] = {}
        self.limited = costs.may_exceed(least_memory(cluster))

    @property
    def fusing_helps(self) -> bool:
        """Whether whole backwards can save seconds, or memory that waits for W."""
        return self._split_costs or self.limited or self.actions_cost

    @property
    def actions_cost(self) -> bool:
        """Whether actions take more than their layers."""
        return any(self._action)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.speeds)

    def trains(self, end: int) -> bool:
        """Return whether a stage that ends before this layer has a backward."""
        return self._has_backward[end - 1]

    def device_kinds(self) -> list[int]:
        """Return a number for each device; equal ones if the devices and all their links are alike."""
        alike = len({link for row in self._links for link in row}) <= 1
        keys = [
            (speed, limit, action, -1 if alike else at)
            for at, (speed, limit, action) in enumerate(
                zip(self.speeds, self.limits, self._action, strict=True)
            )
        ]
        return [keys.index(key) for key in keys]

    def seconds(self, start: int, end: int, device: int) -> float:
        """Return what layers add to the load of a device for one micro-batch."""
        return (self._compute[end] - self._compute[start]) / self.speeds[device]

    def loads(self, layout: Layout) -> list[float]:
        """Return the seconds of each device for one micro-batch, without recomputes."""
        found, start, compute = [0.0] * self.devices, 0, self._compute
        for end, device, fused in zip(
            (*layout.borders, self.layers), layout.devices, layout.fused, strict=True
        ):
            actions = self._action[device] * (2 if fused else 3)
            found[device] += (compute[end] - compute[start]) / self.speeds[device] + actions
            start = end
        return found

    def bound(self, layout: Layout) -> float:
        """Return seconds that no order of a layout's operations can beat, whatever the memory.

        For each device: its work, after the first forward can have reached it. Until the first gradient can have come
        back it has forwards only, and while the gradient goes on to the first stage it has deferred W's only.
        """
        m, stages = self.micro_batches, layout.stages
        edges = (0, *layout.borders, self.layers)
        inputs, heads, tails = [], [], []
        first, last = [-1] * self.devices, [-1] * self.devices
        work, ahead, behind = [0.0] * self.devices, [0.0] * self.devices, [0.0] * self.devices
        head = tail = 0.0
        forward_sums, input_sums, weight_sums, split_sums = (
            self._forward,
            self._input,
            self._weight,
            self._split,
        )
        before = -1
        for at in range(stages):
            start, end, device = edges[at], edges[at + 1], layout.devices[at]
            speed = self.speeds[device]
            action = self._action[device]
            forward = (forward_sums[end] - forward_sums[start]) / speed + action
            for_input = (input_sums[end] - input_sums[start]) / speed
            for_weight = (weight_sums[end] - weight_sums[start]) / speed
            if layout.fused[at]:
                for_input, for_weight = for_input + for_weight + action, 0.0
            else:
                if self._split_matters and (whole := for_input + for_weight):
                    factor = max(0.0, 1 + (split_sums[end] - split_sums[start]) / speed / whole)
                    for_input, for_weight = for_input * factor, for_weight * factor
                for_input, for_weight = for_input + action, for_weight + action
            if layout.modes[at] != "never":
                work[device] += forward * (1 - (layout.modes[at] == "except-last") / m)
            if before not in (-1, device):
                size = self._output[start - 1]
                head += self._latency[before][device] + size * self._per_byte[before][device]
                tail += self._latency[device][before] + size * self._per_byte[device][before]
            before = device
            heads.append(head)
            tails.append(tail)
            inputs.append(for_input)
            head += forward
            tail += for_input
            if first[device] < 0:
                first[device] = at
            last[device] = at
            work[device] += forward + for_input + for_weight
            ahead[device] += forward
            behind[device] += for_weight
        # From here on `head` is the time of the last forward's end, `tail` that of all backwards on the way back.
        found = 0.0
        for device in range(self.devices):
            one, other = first[device], last[device]
            if one < 0:
                continue
            gradient = head + tail - tails[other] - inputs[other]  # when the first can have come back
            waits = max(0.0, gradient - heads[one] - m * ahead[device])
            drains = max(0.0, tails[one] - m * behind[device])
            found = max(found, heads[one] + m * work[device] + waits + drains)
        return found

    def work(self, layout: Layout) -> Work | None:
        """Return the operations of a layout; None if one micro-batch does not fit its device."""
        m, stages = self.micro_batches, layout.stages
        forwards, inputs, weights = [], [], []
        edges = (0, *layout.borders, self.layers)
        for at, device in enumerate(layout.devices):
            start, end, speed = edges[at], edges[at + 1], self.speeds[device]
            action = self._action[device]
            forwards.append((self._forward[end] - self._forward[start]) / speed + action)
            for_input = (self._input[end] - self._input[start]) / speed
            for_weight = (self._weight[end] - self._weight[start]) / speed
            whole = for_input + for_weight
            if layout.fused[at]:
                inputs.append(whole + action)
                weights.append(0.0)
                continue
            factor = max(0.0, 1 + (self._split[end] - self._split[start]) / speed / whole) if whole else 1.0
            inputs.append(for_input * factor + action)
            weights.append(for_weight * factor + action)
        ahead, back, hold_ahead, hold_back = ([0.0] * stages for _ in range(4))
        for at in range(1, stages):
            one, other = layout.devices[at - 1], layout.devices[at]
            if one != other:
                size = self._output[edges[at] - 1]
                hold_ahead[at] = size * self._per_byte[one][other]
                hold_back[at - 1] = size * self._per_byte[other][one]
                ahead[at] = self._latency[one][other] + hold_ahead[at]
                back[at - 1] = self._latency[other][one] + hold_back[at - 1]
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
            hold_forward=hold_ahead,
            hold_backward=hold_back,
            fused=layout.fused,
            room=room,
        )

    def stage_bytes(self, start: int, end: int) -> _Bytes:
        """Return the bytes of the stage of layers ``start`` to ``end``; what waits for skips is not counted."""
        found = self._bytes.get((start, end))
        if found is None:
            sizes = self._costs.sizes(slice(start, end))
            kept = sizes.per_micro_batch[0, 0].tolist()
            found = _Bytes(float(sizes.static[0, 0]), float(sizes.transient[0, 0, :4].max()), *kept)
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
        deferred: list[float] = []
        most = [0.0] * self.devices
        for device, size, count, fused in zip(layout.devices, sizes, again, layout.fused, strict=True):
            left = 0.0 if fused else size.deferred
            # What I leaves may be more than the stash before it. It is then counted from the forward on.
            stash += [max(size.boundary, left)] * count + [max(size.stash, left)] * (m - count)
            deferred += [left] * m
            if count:
                most[device] = max(most[device], size.stash - max(size.boundary, left))
        needs, later = [0.0] * layout.stages, [0.0] * self.devices
        for stage in reversed(range(layout.stages)):
            device, first = layout.devices[stage], stage * m
            later[device] += max(stash[first], stash[first + m - 1])
            needs[stage] = later[device] + most[device]
            if needs[stage] > limit[device] * (1 + 1e-9):
                return None
        return Room(limit, stash, deferred, most, needs)
