"""Splits the idle time of each device by phase and by cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.action import BACKWARDS, Action, Kind
from ..core.dependencies import dependencies
from ..core.timed_schedule import TimedSchedule
from .arrivals import arrivals

_Span = tuple[Action, float, float, float, float]  # start, end, and when its inputs were made, and were there


@dataclass(frozen=True)
class Idle:
    """Seconds for which one device computes nothing within the makespan, split in two ways.

    Both splits sum to `total`.

    Attributes:
        warm_up: up to the device's first backward.
        steady: between the two others.
        cool_down: from the end of its last forward on.
        producer: waiting for another device to make what the next action needs.
        transfer: waiting for that to arrive, or for a copy between the device and its host.
        delay: between the arrival of an action's inputs and its start; only measured timelines have it. Where the
            timeline has no transfer for a message, it counts as `transfer`.
        finished: nothing left to do.
    """

    warm_up: float = 0.0
    steady: float = 0.0
    cool_down: float = 0.0
    producer: float = 0.0
    transfer: float = 0.0
    delay: float = 0.0
    finished: float = 0.0

    @property
    def total(self) -> float:
        """All idle seconds."""
        return self.warm_up + self.steady + self.cool_down


def idle(timeline: TimedSchedule) -> tuple[Idle, ...]:
    """Return the idle time of each device between the first start and the last end anywhere."""
    graph = dependencies(timeline.schedule)
    ends = [end for row in timeline.ends for end in row]
    made, there = [-math.inf] * graph.actions, [-math.inf] * graph.actions
    home = timeline.schedule.device_of
    columns = (graph.source, graph.target, graph.source_stage, graph.target_stage, graph.is_copy)
    edges = zip(*(column.tolist() for column in columns), arrivals(timeline, graph), strict=True)
    for source, target, sender, receiver, is_copy, arrival in edges:
        made[target] = max(made[target], ends[source])
        if is_copy or home[sender] != home[receiver]:
            there[target] = max(there[target], math.inf if arrival is None else arrival)
    first, last = timeline.origin, timeline.origin + timeline.makespan
    return tuple(
        _device_idle(
            [(*span, made[offset + at], there[offset + at]) for at, span in enumerate(timeline.row(device))],
            first,
            last,
        )
        for device, offset in enumerate(graph.offsets[:-1])
    )


def _device_idle(spans: Sequence[_Span], first: float, last: float) -> Idle:
    if not spans:
        return Idle(warm_up=last - first, finished=last - first)
    steady = min((start for action, start, *_ in spans if action.kind in BACKWARDS), default=last)
    last_forward = max((end for action, _, end, *_ in spans if action.kind is Kind.F), default=first)
    cool_down = max(steady, last_forward)
    gaps = list(_gaps(spans, first))
    done = spans[-1][2]
    producer = sum(min(max(made, begin), end) - begin for begin, end, made, _ in gaps)
    ready = sum(min(max(made, there, begin), end) - begin for begin, end, made, there in gaps)
    all_gaps = [*((begin, end) for begin, end, *_ in gaps), (done, last)]
    return Idle(
        warm_up=_within(all_gaps, first, steady),
        steady=_within(all_gaps, steady, cool_down),
        cool_down=_within(all_gaps, cool_down, last),
        producer=producer,
        transfer=ready - producer,
        delay=sum(end - begin for begin, end, *_ in gaps) - ready,
        finished=last - done,
    )


def _gaps(spans: Iterable[_Span], clock: float) -> Iterable[tuple[float, float, float, float]]:
    """Begin and end of each gap before an action, and when that action's input was made, and was there."""
    for _, start, end, made, there in spans:
        if start > clock:
            yield clock, start, made, there
        clock = max(clock, end)


def _within(gaps: Iterable[tuple[float, float]], first: float, last: float) -> float:
    return sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in gaps)
