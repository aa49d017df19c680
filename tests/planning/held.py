"""What stages and devices hold and take, added up layer by layer: an oracle for the planner's formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import schedules
from pipepart import Cluster
from schedules import Kind, Schedule
from tests.planning.problems import Layer


class Moment(NamedTuple):
    """What a stage has while an action of its device runs: numbers of micro-batches, and its own action."""

    full: int
    inputs: int
    deferred: int
    input_messages: int
    gradient_messages: int
    runs: str
    has_gradients: bool


def moments(schedule: Schedule, row: int, step: schedules.Timeline | None = None) -> list[dict[int, Moment]]:
    """What the stages of a device have at each of its actions, in a step or if all stages take equal times."""
    schedule = schedules.split_overlaps(schedule)
    ones = [1.0] * schedule.stages
    step = step or schedules.simulate(
        schedule, schedules.StageCosts(ones, ones, ones, recompute=[0.0] * schedule.stages)
    )
    ends = {action: step.span(action)[1] for actions in schedule.actions for action in actions}
    actions, own = schedule.actions[row], schedule.stages_of(row)
    again = {(a.stage, a.micro_batch) for a in actions if a.kind is Kind.RECOMPUTE}
    keeps = not schedule.versions  # gradients of the weights, from an earlier step
    now = {stage: Moment(0, 0, 0, 0, 0, "", keeps and stage < schedule.model_stages) for stage in own}
    found = []
    for place, action in enumerate(actions):
        kind, stage = action.kind, action.stage
        start, end = step.span(action)
        peak = end if kind in (Kind.F, Kind.RECOMPUTE) else (start + end) / 2
        held = now[stage]
        if kind in (Kind.F, Kind.RECOMPUTE):
            held = held._replace(full=held.full + 1, inputs=held.inputs - (kind is Kind.RECOMPUTE))
        now[stage] = held
        runs = "F" if kind is Kind.RECOMPUTE else str(kind.value)
        runs = "first B" if kind is Kind.B and not held.has_gradients else runs
        moment = {one: value._replace(runs=runs if one == stage else "") for one, value in now.items()}
        for later in actions[place + 1 :]:
            if later.kind not in (Kind.F, Kind.B, Kind.I):
                continue
            sender = later.stage + (-1 if later.kind is Kind.F else 1)
            if 0 <= sender < schedule.stages and schedule.device_of[sender] == row:
                continue  # nothing is copied within a device
            senders = [a for a in ends if a.stage == sender and a.micro_batch == later.micro_batch]
            wanted = (Kind.F,) if later.kind is Kind.F else (Kind.B, Kind.I)
            if any(a.kind in wanted and ends[a] <= peak for a in senders):
                value = moment[later.stage]
                name = "input_messages" if later.kind is Kind.F else "gradient_messages"
                moment[later.stage] = value._replace(**{name: getattr(value, name) + 1})
        found.append(moment)
        if kind is Kind.F and (stage, action.micro_batch) in again:
            now[stage] = held._replace(full=held.full - 1, inputs=held.inputs + 1)
        if kind in (Kind.B, Kind.I):
            held = held._replace(
                full=held.full - 1, deferred=held.deferred + (kind is Kind.I), has_gradients=True
            )
            now[stage] = held
        if kind is Kind.OPT_STEP:
            now[stage] = held._replace(has_gradients=keeps)
        if kind is Kind.W:
            now[stage] = held._replace(deferred=held.deferred - 1)
    return found


@dataclass(frozen=True)
class Held:
    """Bytes of a stage: always, of each micro-batch, of messages, and what each kind of action needs besides."""

    static: int
    gradients: int
    stash: int
    given: int
    waiting: int
    arriving: int
    message: int
    backward: bool
    needs: Mapping[str, int]

    def at(self, moment: Moment) -> int:
        """The bytes at a moment."""
        kept = moment.full * self.stash + moment.inputs * self.given + moment.deferred * self.waiting
        messages = moment.input_messages * self.message + moment.gradient_messages * self.arriving
        static = self.static - (0 if moment.has_gradients else self.gradients)
        return static + kept + messages + self.needs.get(moment.runs, 0)


def held_by(layers: Sequence[Layer], start: int, end: int, input_bytes: int = 0) -> Held:
    """The bytes of a stage of layers ``start`` to ``end``, with Adam's state."""
    inside = layers[start:end]
    message = layers[start - 1].output if start else 0
    given = message if start else input_bytes
    backward = any(goes_back(layer) for layer in layers[:end])
    arriving = inside[-1].output if end < len(layers) else 0
    gets_gradient = any(goes_back(layer) for layer in layers[:start])
    stashes, stash = [], given if gets_gradient or inside[0].keeps_input else 0
    for place, layer in enumerate(inside):
        stash += layer.saved + (inside[place - 1].output if place and layer.keeps_input else 0)
        stashes.append(stash)
    static = sum(layer.parameters * (4 if layer.trained else 1) for layer in inside)
    weights = [layer.parameters if layer.trained else 0 for layer in inside]
    peaks = [layer.peak for layer in inside]
    if not backward:
        return Held(static, sum(weights), 0, 0, 0, 0, message, False, {"F": max(peaks) + message})
    waits = [layer.waiting if defers(layer) else 0 for layer in inside]
    needs = {"F": max(map(sum, zip(stashes, peaks, strict=True))) - stash, "W": max(peaks)}
    for name, left in (("B", [0] * len(inside)), ("I", waits), ("first B", weights)):
        levels = [
            stashes[place]
            + peaks[place]
            + sum(left[place + 1 :])
            + (layer.output if place < len(inside) - 1 else 0)
            for place, layer in enumerate(inside)
            if any(goes_back(other) for other in layers[: start + place + 1])
        ]
        needs[name] = max(max(levels) + arriving - stash, 0)
    return Held(static, sum(weights), stash, given, sum(waits), arriving, message, True, needs)


def peak(found: Sequence[Mapping[int, Moment]], stages: Mapping[int, Held], older: Mapping[int, int]) -> int:
    """The most that a device holds: its stages by number, with the older versions of their weights."""
    versions = sum(stages[stage].gradients * count for stage, count in older.items())
    return versions + max(sum(stages[stage].at(one) for stage, one in moment.items()) for moment in found)


def step_of(
    layers: Sequence[Layer],
    edges: Sequence[int],
    order: Schedule,
    cluster: Cluster,
    names: Sequence[str],
    loss_seconds: float = 0.0,
) -> schedules.Timeline:
    """The simulated step of a cut at ``edges``, with its rows on the devices of these names."""
    spans = list(itertools.pairwise(edges))
    speeds = [cluster.device(names[row]).speed * order.micro_batches for row in order.device_of]
    forward, inputs, weights = (
        [
            sum(getattr(layer, kind) for layer in layers[start:end]) / speed
            for (start, end), speed in zip(spans, speeds, strict=True)
        ]
        for kind in ("forward", "backward_input", "backward_weight")
    )
    forward[-1] += loss_seconds / speeds[-1]
    links = [[cluster.link_between(one, other) for other in names] for one in names]
    costs = schedules.StageCosts(
        forward,
        inputs,
        weights,
        latency=[[link.latency for link in row] for row in links],
        bandwidth=[[link.bandwidth or math.inf for link in row] for row in links],
        message_bytes=[layers[end - 1].output for _, end in spans],
    )
    return schedules.simulate(order, costs, contention=True)


def goes_back(layer: Layer) -> bool:
    """Whether a layer has a backward of its own."""
    return bool((layer.trained and layer.parameters) or layer.backward_input or layer.backward_weight)


def defers(layer: Layer) -> bool:
    """Whether a layer may keep tensors from I to W: not if all its weights are those of earlier layers.

    A weight that a stage uses twice gets its gradient in I, and so does the copy of a weight of an earlier stage.
    """
    return bool(not layer.shares_with or (layer.trained and layer.parameters))
