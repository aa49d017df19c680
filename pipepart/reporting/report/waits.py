"""Finds for what each action of a timeline made its device wait: an action of another device, a message, or nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from schedules import Action, Timeline
from schedules.analysis.arrivals import arrivals
from schedules.core.dependencies import dependencies


class Wait(NamedTuple):
    """Idle time of a device before an action, in seconds.

    begin: when the device became idle.
    producer: seconds until the last of the action's inputs was made, by the action ``source`` of another device.
    message: seconds until that input had arrived.
    delay: seconds from then until the action started; simulated timelines have none.
    """

    begin: float
    producer: float
    message: float
    delay: float
    source: Action | None

    @property
    def total(self) -> float:
        """All idle seconds before the action."""
        return self.producer + self.message + self.delay


def waits(timeline: Timeline) -> list[list[Wait]]:
    """Return the wait before each action of each device.

    The sums of a device equal those of :attr:`schedules.Timeline.idle`, less the time after its last action.
    """
    schedule = timeline.schedule
    edges = dependencies(schedule)
    actions = [action for row in schedule.actions for action in row]
    ends = [end for row in timeline.ends for end in row]
    columns = (edges.source, edges.target, edges.source_stage, edges.target_stage, edges.is_copy)
    arrived = arrivals(timeline, edges)
    inputs: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)  # made, arrived, source
    for source, target, sender, receiver, is_copy, arrival in zip(
        *(column.tolist() for column in columns), arrived, strict=True
    ):
        if is_copy or schedule.device_of[sender] != schedule.device_of[receiver]:
            made = ends[source]
            inputs[target].append((made, made if arrival is None else max(made, arrival), source))
    origin = min((min(row) for row in timeline.starts if len(row)), default=0.0)
    found: list[list[Wait]] = []
    for first, row_starts, row_ends in zip(edges.offsets, timeline.starts, timeline.ends, strict=False):
        begin, row = origin, []
        for number, (start, end) in enumerate(zip(row_starts, row_ends, strict=True), first):
            made, _, source = max(inputs[number], default=(begin, begin, None))
            there = max((each[1] for each in inputs[number]), default=begin)
            free = max(start, begin)
            producer = min(max(made, begin), free) - begin
            message = min(max(there, made, begin), free) - begin - producer
            delay = free - begin - producer - message
            row.append(Wait(begin, producer, message, delay, None if source is None else actions[source]))
            begin = max(begin, end)
        found.append(row)
    return found
