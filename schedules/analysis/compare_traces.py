"""Puts several timelines into one Chrome trace, for example the prediction under the measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .chrome_trace import ROWS
from .timeline import Timeline

_Event = dict[str, Any]


def side_by_side(timelines: Mapping[str, Timeline]) -> _Event:
    """Return one Chrome trace of several timelines, for json.dump.

    timelines: `Timeline` objects by name. Each becomes a process, and each of its devices a thread.

    `Timeline.from_trace` reads the first one back.
    """
    traces = {name: timeline.to_trace() for name, timeline in timelines.items()}
    return {
        "traceEvents": [
            event
            for process, (name, trace) in enumerate(traces.items())
            for event in _as_process(process, name, trace["traceEvents"])
        ],
        "displayTimeUnit": "ms",
        "otherData": {"timelines": {name: trace["otherData"] for name, trace in traces.items()}},
    }


def _as_process(process: int, name: str, events: list[_Event]) -> Iterator[_Event]:
    """Yield the events of a trace, with its device processes turned into threads of one process."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    for event in events:
        device, row = event["pid"], event.get("tid", 0)
        moved = {**event, "pid": process, "tid": device * ROWS + row}
        if event["ph"] == "M":
            if event["name"] == "process_name":
                yield {**moved, "name": "thread_name"}
            elif row and (device, row) in used:
                yield {**moved, "args": {"name": f"device {device}: {event['args']['name']}"}}
            continue
        if event["ph"] == "C":
            moved["name"] = f"{event['name']}, device {device}"
        if "id" in event:
            moved["id"] = f"{name} {event['id']}"
        yield moved
