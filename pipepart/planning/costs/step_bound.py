"""Computes seconds that no plan can beat, whatever its cut, its placement of stages and its order of actions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...profiling import Costs, LayerCost
from .stage_memory import Floats


def step_bound(
    costs: Costs,
    speeds: Sequence[float],
    replicas: int = 1,
    action_seconds: float = 0.0,
) -> float:
    """Return a lower bound in seconds of every step of these layers on these devices.

    It holds for any cut, any placement of stages on devices, and any order of actions, with full or split backwards.
    Transfers, recomputes and sums of gradients over replicas are taken to be free, and memory without limit. It is the
    larger of two bounds:

    - *All devices together.* A device idles until the forward of the first micro-batch reaches a layer of it. The
      devices of a replica have different layers, so one of them may begin at once, another after one layer, another
      after two. What they can do in the rest of the step is at least the work of all micro-batches.
    - *One layer.* The device of a layer runs it for every micro-batch of its replica. It waits for the layers before,
      and for the first gradient if it runs out of forwards; after its last backward the layers before it run theirs.

    Args:
        costs: of the layers for one micro-batch, in an order in which they can run.
        speeds: of the devices; a plan may leave some out.
        replicas: of the model, which share the micro-batches.
        action_seconds: what every device takes for each action beside its layers, at the least.
    """
    layers = len(costs.layers)
    before: list[list[int]] = [[] for _ in range(layers)]
    for source, target in pairwise(range(layers)):
        before[target].append(source)
    trip = _Trip(costs, before)
    fastest = max(speeds)
    together = _together(costs, trip.head, sorted(speeds, reverse=True), replicas, action_seconds)
    return max(
        together, trip.longest(-(-costs.micro_batches // replicas), action_seconds * fastest) / fastest
    )


def _together(
    costs: Costs, head: Floats, speeds: Sequence[float], replicas: int, action_seconds: float
) -> float:
    """The least X such that the devices can do all work: sum of speed * (X - lost) over those that lose less than X.

    A device loses the time until it starts, and that for two actions of each micro-batch.
    """
    backward = sum(layer.backward_seconds + min(layer.split_seconds or 0.0, 0.0) for layer in costs.layers)
    forward = sum(layer.forward.seconds for layer in costs.layers)
    work = costs.micro_batches * (forward + max(backward, 0.0) + costs.loss.seconds)
    starts = np.repeat(np.sort(head), replicas)[: len(speeds)]  # the fastest device starts first
    speed = np.array(speeds[: len(starts)])
    lost = starts / speed[0] + 2 * (costs.micro_batches // replicas) * action_seconds
    return float(((work + np.cumsum(speed * lost)) / np.cumsum(speed)).min())


class _Trip:
    """The trip of one micro-batch through all layers and back, on devices of speed 1; one number a layer.

    ::

        F of layers before │ F of the layer and those behind, their I │ I, W │ I of layers before, W of the first
        ───── head ───────▶│───────────────── turn ──────────────────▶│      │──────────── tail ────────────────▶
    """

    def __init__(self, costs: Costs, before: Sequence[Sequence[int]]) -> None:
        layers, loss = costs.layers, costs.loss
        share = _shortest_split(costs)
        self._forward = np.array([one.forward.seconds for one in layers])
        self._inputs = np.array([one.backward_input.seconds for one in layers])
        self._weights = np.array([one.backward_weight.seconds for one in layers]) * share
        sinks = set(range(len(layers))).difference(*before)
        if len(sinks) == 1:  # the loss is always with this layer
            self._forward[-1] += loss.forward.seconds
            self._inputs[-1] += loss.backward_seconds
            loss = LayerCost()
        self._inputs *= share
        self.head, self._tail = np.zeros(len(layers)), np.zeros(len(layers))
        there, back = np.zeros(len(layers)), np.zeros(len(layers))  # behind each layer
        for layer, sources in enumerate(before):
            for source in sources:
                self.head[layer] = max(self.head[layer], self.head[source] + self._forward[source])
                after = self._inputs[source] + max(self._tail[source], self._weights[source])
                self._tail[layer] = max(self._tail[layer], after)
        for layer in reversed(range(len(layers))):
            for source in before[layer]:
                there[source] = max(there[source], self._forward[layer] + there[layer])
                back[source] = max(back[source], self._inputs[layer] + back[layer])
        self._turn = self._forward + there + loss.forward.seconds + share * loss.backward_seconds + back

    def longest(self, micro_batches: int, action_seconds: float) -> float:
        """The most that a layer needs for its micro-batches, with the trips before, between and after."""
        forwards = micro_batches * (self._forward + action_seconds)
        turn = self._turn + action_seconds
        # Until the first gradient is there, the device can run forwards only.
        until_last_forward = self.head + turn + forwards - np.minimum(forwards, turn)
        until_last_input = until_last_forward + micro_batches * (self._inputs + action_seconds)
        behind = np.maximum(micro_batches * self._weights, np.maximum(self._tail, self._weights))
        return float((until_last_input + behind).max())


def _shortest_split(costs: Costs) -> float:
    """The least that a split backward takes of a full one. That of a stage is a mean of those of its layers."""
    if any(one.split_seconds is None for one in costs.layers):
        return 1.0
    parts = [
        1 + (one.split_seconds or 0.0) / one.backward_seconds for one in costs.layers if one.backward_seconds
    ]
    if any((one.split_seconds or 0.0) < 0 for one in costs.layers if not one.backward_seconds):
        return 0.0
    return min(1.0, max(0.0, min(parts, default=1.0)))
