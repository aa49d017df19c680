"""Reads a timeline from a Chrome trace written by `chrome_trace`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from ..core.action import Kind, ScheduleError
from ..core.schedule import Schedule
from ..core.transfer import Transfer
from .chrome_trace import Traced, device_of


def from_trace(trace: Mapping[str, Any]) -> Traced:
    """Return the first timeline of a trace, equal to the one that was written.

    Raises:
        ScheduleError: the trace was not written by `Timeline.to_trace` or `side_by_side`, or lacks actions.
    """
    timelines = trace.get("otherData", {}).get("timelines")
    if not timelines:
        raise ScheduleError(
            "this trace has no timelines in its otherData: it was not written by Timeline.to_trace"
        )
    fields = next(iter(timelines.values()))
    schedule = Schedule.from_json(fields["schedule"])
    starts = [[math.nan] * len(row) for row in schedule.actions]
    ends = [[math.nan] * len(row) for row in schedule.actions]
    transfers: list[tuple[int, Transfer]] = []
    for event in trace["traceEvents"]:
        if event["pid"] != 0:
            continue
        args = event.get("args", {})
        if event["ph"] == "X":
            device = device_of(event["tid"])
            starts[device][args["position"]], ends[device][args["position"]] = args["start"], args["end"]
        elif event["ph"] == "b":
            number = int(event["id"].rpartition(" ")[2])
            transfers.append((number, Transfer(**{**args, "kind": Kind(args["kind"])})))
    if missing := sum(map(math.isnan, chain(*starts))):
        raise ScheduleError(
            f"this trace lacks {missing} of its {sum(map(len, starts))} actions: it was edited"
        )
    return Traced(
        schedule,
        tuple(map(tuple, starts)),
        tuple(map(tuple, ends)),
        tuple(fields["peak_bytes"]),
        tuple(fields["peak_at"]),
        tuple(transfer for _, transfer in sorted(transfers, key=lambda pair: pair[0])),
    )
