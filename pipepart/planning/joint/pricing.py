"""Pricing: converts layouts to dispatcher problems, with seconds, delays and bytes of their stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from schedules.searching.problem import Memory, Problem

from ..costs.layer_ranges import split_share
from ..costs.stage_memory import Mode
from ..plans.stage_plan import StagePlan, copy_seconds
from ..search.parts import Part
from .layout import Layout


class _Bytes(NamedTuple):
    """Bytes of one stage.

    Attributes:
        static: held all the time.
        replicas: gradients of the other replicas, held while they are summed.
        stash, boundary, deferred, copied, input, gradient, workspace: as in :class:`Memory`.
    """

    static: float
    replicas: float
    stash: float
    boundary: float
    deferred: float
    copied: float
    input: float
    gradient: float
    workspace: tuple[float, float, float]


class Pricing:
    """Computes the costs of stages in layouts, and caches them.

    Args:
        part: has the layers, devices and links.
    """

    def __init__(self, part: Part) -> None:
        costs, cluster = part.costs, part.groups.cluster
        self._costs, self._cluster = costs, cluster
        self._summed, self._scale = part.summed_replicas, part.scale
        self.micro_batches, self.layers = part.micro_batches, costs.layers
        self._forward, self._input, self._weight, self._split = costs.sums.tolist()
        self._split_costs = costs.split is not None and bool((costs.split > 0).any())
        self._output = costs.output_bytes.tolist()
        self._has_backward = costs.has_backward.tolist()
        self.speeds = [device.speed for device in cluster.devices]
        self._action = [device.action_seconds for device in cluster.devices]
        self._limits = [device.memory for device in cluster.devices]
        self.limited = costs.may_exceed(min(self._limits))
        # Cached, as the layouts of a search share most of their stages.
        self._seconds = cache(self._seconds_of)
        self._bytes = cache(self._bytes_of)
        self._link_seconds = cluster.places.seconds

    @property
    def whole_helps(self) -> bool:
        """True if whole backwards may save seconds, or the bytes that separate I and W hold."""
        return self._split_costs or self.limited or any(self._action)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.speeds)

    def trains(self, end: int) -> bool:
        """Return True if a stage that ends before layer ``end`` has a backward."""
        return self._has_backward[end - 1]

    def problem(self, layout: Layout) -> Problem:
        """Return the dispatcher problem of a layout."""
        stages, homes, edges = layout.stages, layout.devices, (0, *layout.borders, self.layers)
        parts = zip(edges[:-1], edges[1:], homes, layout.whole, layout.modes, strict=True)
        forward, inputs, weights, again = zip(*(self._seconds(*part) for part in parts), strict=True)
        # Of the border before each stage, and behind the last: the first and the last are none.
        delays, holds = [0.0] * (stages + 1), [0.0] * (stages + 1)
        for at in range(1, stages):
            latency, per_byte = self._link_seconds(homes[at - 1], homes[at])
            holds[at] = self._output[edges[at] - 1] * per_byte
            delays[at] = latency + holds[at]
        repeated = {"except-last": self.micro_batches - 1, "always": self.micro_batches}
        return Problem(
            devices=self.devices,
            micro_batches=self.micro_batches,
            device_of=homes,
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            whole=layout.whole,
            recompute=again,
            recomputed=[repeated.get(mode, 0) for mode in layout.modes],
            delay_forward=delays[:-1],
            delay_backward=delays[1:],
            hold_forward=holds[:-1],
            hold_backward=holds[1:],
            memory=self._memory(layout, edges) if self.limited else None,
            scale=self._scale,
        )

    def _seconds_of(
        self, start: int, end: int, device: int, whole: bool, mode: Mode
    ) -> tuple[float, float, float, float]:
        """Return the seconds of F, I, W and a recompute of a stage; a whole backward counts as I."""
        speed, action = self.speeds[device], self._action[device]
        forward, inputs, weights, split = (
            (sums[end] - sums[start]) / speed
            for sums in (self._forward, self._input, self._weight, self._split)
        )
        again, backward = forward + action, inputs + weights
        if whole:
            inputs, weights = backward + action, 0.0
        else:
            share = float(split_share(split, backward))
            inputs, weights = inputs * share + action, weights * share + action
        if mode != "offload":
            return again, inputs, weights, again
        size = self._bytes(start, end, whole, mode)
        stage = StagePlan.model_construct(
            offload="stash", stash_bytes=size.boundary + size.copied / 2, boundary_bytes=size.boundary
        )
        beside, busy = copy_seconds(stage, self._cluster.devices[device])
        # Each copy overlaps with one operation of the device; the rest of the copy is added.
        return (
            again + busy + action + max(0.0, beside - forward),
            inputs + busy + action + max(0.0, beside - inputs),
            weights,
            again,
        )

    def _memory(self, layout: Layout, edges: Sequence[int]) -> Memory:
        """Return the memory limits and bytes of a layout; see :mod:`..costs.stage_memory` for the formula."""
        homes, limit, replicas = layout.devices, list(self._limits), [0.0] * self.devices
        parts = zip(edges[:-1], edges[1:], layout.whole, layout.modes, strict=True)
        sizes = [self._bytes(*part) for part in parts]
        if self._costs.skips:
            waiting = self._costs.skips.waiting_of(np.array([layout.borders], dtype=np.int64))[0].tolist()
            sizes = [
                size._replace(stash=size.stash + more, boundary=size.boundary + more)
                if self.trains(end)
                else size
                for size, more, end in zip(sizes, waiting, edges[1:], strict=True)
            ]
        for device, size in zip(homes, sizes, strict=True):
            limit[device] -= size.static
            replicas[device] += size.replicas
        _, _, stash, boundary, deferred, copied, inputs, gradients, workspace = zip(*sizes, strict=True)
        return Memory(
            # After all backwards, a device also holds the gradients of the other replicas.
            limit=[room if room >= more else -1.0 for room, more in zip(limit, replicas, strict=True)],
            stash=stash,
            deferred=deferred,
            boundary=boundary,
            copied=copied,
            # Within a device nothing is sent.
            inputs=[size * (at > 0 and homes[at - 1] != homes[at]) for at, size in enumerate(inputs)],
            gradients=[
                size * (device != behind)
                for size, device, behind in zip(gradients, homes, (*homes[1:], homes[-1]), strict=True)
            ],
            workspace=workspace,
        )

    def _bytes_of(self, start: int, end: int, whole: bool, mode: Mode) -> _Bytes:
        """Return the bytes of the stage with layers ``start`` to ``end - 1``, without values that wait for skips."""
        sizes = self._costs.sizes(slice(start, end))
        forward, backward, for_input, for_weight, _ = sizes.transient[0, 0].tolist()
        stash, boundary, deferred = sizes.per_micro_batch[0, 0].tolist()
        offloads = mode == "offload"
        input_bytes, gradient_bytes = sizes.messages[0, 0].tolist()
        return _Bytes(
            static=float(sizes.static[0, 0]),
            replicas=float((self._summed - 1) * sizes.version[0, 0]),
            stash=boundary if offloads else stash,
            boundary=boundary,
            deferred=deferred,
            # An offloaded stash takes memory during its F or I, and during the operation that overlaps with its copy.
            copied=2 * (stash - boundary) * offloads,
            input=input_bytes,
            gradient=gradient_bytes,
            workspace=(forward, backward, 0.0) if whole else (forward, for_input, for_weight),
        )
