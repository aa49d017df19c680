"""Finds what each device of a timeline waits for before each action, and sums its idle time by cause."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ..core.action import HOST_COPIES, Action, Kind
from ..core.dependencies import CODE, Dependencies, dependencies
from ..core.timed_schedule import TimedSchedule

_COPIES = {CODE[kind]: kind for kind in HOST_COPIES}


class Wait(NamedTuple):
    """Idle time of a device before an action, in seconds.

    begin: when the device became idle.
    producer: seconds until the last of the action's inputs was made, by the action ``source`` of another device.
    transfer: seconds until its inputs had arrived.
    delay: seconds from then until the action started; simulated timelines have none.
    """

    begin: float
    producer: float
    transfer: float
    delay: float
    source: Action | None

    @property
    def total(self) -> float:
        """All idle seconds before the action."""
        return self.producer + self.transfer + self.delay


@dataclass(frozen=True)
class Idle:
    """Seconds for which one device computes nothing within the makespan, by cause.

    Attributes:
        producer: waiting for another device to make what the next action needs.
        transfer: waiting for that to arrive, or for a copy between the device and its host.
        delay: between the arrival of an action's inputs and its start; only measured timelines have it. Where the
            timeline has no transfer for a message, it counts as `transfer`.
        finished: nothing left to do.
    """

    producer: float = 0.0
    transfer: float = 0.0
    delay: float = 0.0
    finished: float = 0.0

    @property
    def total(self) -> float:
        """All idle seconds."""
        return self.producer + self.transfer + self.delay + self.finished


def idle(timeline: TimedSchedule) -> tuple[Idle, ...]:
    """Return the idle time of each device between the first start and the last end anywhere."""
    end = timeline.origin + timeline.makespan
    return tuple(
        Idle(
            producer=sum(wait.producer for wait in row),
            transfer=sum(wait.transfer for wait in row),
            delay=sum(wait.delay for wait in row),
            finished=end - max(ends, default=timeline.origin),
        )
        for row, ends in zip(waits(timeline), timeline.ends, strict=True)
    )


def waits(timeline: TimedSchedule) -> list[list[Wait]]:
    """Return the wait before each action of each device."""
    graph, home = dependencies(timeline.schedule), timeline.schedule.device_of
    actions = list(chain.from_iterable(timeline.schedule.actions))
    ends = list(chain.from_iterable(timeline.ends))
    columns = (graph.source, graph.target, graph.source_stage, graph.target_stage, graph.is_copy)
    edges = zip(*(column.tolist() for column in columns), arrivals(timeline, graph), strict=True)
    inputs: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)  # made, arrived, source
    for source, target, sender, receiver, is_copy, arrival in edges:
        if is_copy or home[sender] != home[receiver]:
            inputs[target].append((ends[source], math.inf if arrival is None else arrival, source))
    rows = []
    for device, first in enumerate(graph.offsets[:-1]):
        begin, row = timeline.origin, []
        for number, (_, start, end) in enumerate(timeline.row(device), first):
            ready, _, source = max(inputs[number], default=(begin, begin, None))
            there = max((arrived for _, arrived, _ in inputs[number]), default=begin)
            free = max(start, begin)
            producer = min(max(ready, begin), free) - begin
            transfer = min(max(there, ready, begin), free) - begin - producer
            delay = free - begin - producer - transfer
            row.append(Wait(begin, producer, transfer, delay, None if source is None else actions[source]))
            begin = max(begin, end)
        rows.append(row)
    return rows


def arrivals(timeline: TimedSchedule, graph: Dependencies) -> list[float | None]:
    """Return the arrival time in seconds of each edge's message; None if no transfer carries it.

    Edges within a device have none, except copies to and from its host.
    """
    if not len(timeline.transfers):
        return [None] * graph.source.size
    arrived = {
        (each.kind, each.source, each.target, each.micro_batch): each.end for each in timeline.transfers
    }
    codes, numbers = graph.code.tolist(), graph.micro_batch.tolist()
    columns = (graph.source, graph.target, graph.source_stage, graph.target_stage)
    ends: list[float | None] = []
    for source, target, sender, receiver in zip(*(column.tolist() for column in columns), strict=True):
        kind = Kind.F if receiver > sender else Kind.B
        kind = _COPIES.get(codes[target], _COPIES.get(codes[source], kind))
        ends.append(arrived.get((kind, sender, receiver, numbers[source])))
    return ends
