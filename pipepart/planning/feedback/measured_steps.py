"""Computes the seconds of each stage of a plan from measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from schedules import Kind, Schedule, Timeline, split_overlaps

from ..plan_document import Plan

_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})


@dataclass(frozen=True)
class StageTimes:
    """Measured seconds of one micro-batch on a stage: medians over micro-batches and steps."""

    forward: float
    backward: float


def checked_traces(plan: Plan, trace: Timeline | Sequence[Timeline]) -> list[Timeline]:
    """Return the measured steps, checked to be steps of the plan.

    Raises:
        ValueError: there is no trace, or one is empty or of another schedule than the plan's.
    """
    if trace is None:
        raise ValueError("there is no trace: make the Pipeline with trace=True and run a step first")
    traces = [trace] if isinstance(trace, Timeline) else list(trace)
    if not traces:
        raise ValueError("there is no trace: give at least one measured step")
    planned = split_overlaps(plan.build_schedule())
    for number, one in enumerate(traces):
        if not isinstance(one, Timeline):
            raise ValueError(f"trace {number} is no Timeline but {one!r:.80}")
        which = "the trace" if len(traces) == 1 else f"trace {number}"
        if not any(one.schedule.actions) or not one.makespan > 0:
            raise ValueError(f"{which} is empty: nothing in it takes time")
        if not all(math.isfinite(time) for rows in (one.starts, one.ends) for row in rows for time in row):
            raise ValueError(f"{which} has times that are no numbers")
        if difference := _difference(one.schedule, planned):
            raise ValueError(f"{which} is not a step of this plan: {difference}")
    return traces


def stage_times(plan: Plan, traces: Sequence[Timeline]) -> list[StageTimes]:
    """Return the measured seconds of one micro-batch on each stage of the first replica.

    Seconds of further replicas are scaled to the devices of the first. If a stage recomputes, its forward is the mean
    of both runs. The two parts of a split backward are added.
    """
    found = [_Samples() for _ in plan.stages]
    speeds = [plan.cluster.device(stage.device).speed for stage in plan.all_stages]
    for trace in traces:
        backward: dict[tuple[int, int | None], float] = {}
        for action, start, end in _spans(trace):
            number = action.stage % len(found)
            stage, seconds = found[number], (end - start) * speeds[action.stage] / speeds[number]
            if action.kind is Kind.F:
                stage.forward.append(seconds)
            elif action.kind is Kind.RECOMPUTE:
                stage.again.append(seconds)
            elif action.kind in _BACKWARD:
                key = number, action.micro_batch
                backward[key] = backward.get(key, 0.0) + seconds
        for (stage, _), seconds in backward.items():
            found[stage].backward.append(seconds)
    return [stage.times for stage in found]


class _Samples:
    """Seconds of each forward, recomputed forward and backward of a stage."""

    def __init__(self) -> None:
        self.forward: list[float] = []
        self.again: list[float] = []
        self.backward: list[float] = []

    @property
    def times(self) -> StageTimes:
        once = median(self.forward)
        forward = (once + median(self.again)) / 2 if self.again else once
        return StageTimes(forward, median(self.backward) if self.backward else 0.0)


def _spans(trace: Timeline):
    for row, starts, ends in zip(trace.schedule.actions, trace.starts, trace.ends, strict=True):
        yield from zip(row, starts, ends, strict=True)


def _difference(traced: Schedule, planned: Schedule) -> str:
    """Return how the traced schedule differs from the plan's, or an empty text."""
    for what, one, other in (
        ("schedule", traced.name, planned.name),
        ("devices", traced.devices, planned.devices),
        ("stages", traced.stages, planned.stages),
        ("micro-batches", traced.micro_batches, planned.micro_batches),
    ):
        if one != other:
            return f"its {what}: {one!r}, the plan's: {other!r}"
    for device, rows in enumerate(zip(traced.actions, planned.actions, strict=True)):
        for place, (one, other) in enumerate(zip_longest(*rows)):
            if one != other:
                return (
                    f"action {place} of device {device} is {one or 'none'}, the plan's {other or 'none'} "
                    f"(schedule {planned.name!r})"
                )
    if traced.device_of != planned.device_of:
        return f"its stages are on devices {list(traced.device_of)}, the plan's on {list(planned.device_of)}"
    return ""
