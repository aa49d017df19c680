"""Finds when the inputs of each action arrive, from the message and host copy times of a timeline."""

from __future__ import annotations

from ..core.action import HOST_COPIES, Kind
from ..core.dependencies import CODE, Dependencies
from ..core.timed_schedule import TimedSchedule

_COPIES = {CODE[kind]: kind for kind in HOST_COPIES}


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
    edges = zip(
        *(column.tolist() for column in (graph.source, graph.target, graph.source_stage, graph.target_stage)),
        strict=True,
    )
    found = []
    for source, target, sender, receiver in edges:
        kind = Kind.F if receiver > sender else Kind.B
        kind = _COPIES.get(codes[target], _COPIES.get(codes[source], kind))
        found.append(arrived.get((kind, sender, receiver, numbers[source])))
    return found
