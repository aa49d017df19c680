"""Reads a timeline from a Chrome trace written by `write_trace`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from ..core.action import Kind, ScheduleError
from ..core.schedule import Schedule
from ..core.transfer import Transfer


def from_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the first timeline of a trace, equal to the one that was written.

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
    transfers: dict[int, Transfer] = {}
    for event in trace["traceEvents"]:
        if event["pid"] != 0:
            continue
        args, device = event.get("args", {}), event.get("tid")
        if event["ph"] == "X":
            starts[device][args["position"]], ends[device][args["position"]] = args["start"], args["end"]
        elif event["ph"] == "b":
            number = int(event["id"].rpartition(" ")[2])
            transfers[number] = Transfer(**{**args, "kind": Kind(args["kind"])})
    if missing := sum(map(math.isnan, chain(*starts))):
        raise ScheduleError(
            f"this trace lacks {missing} of its {sum(map(len, starts))} actions: it was edited"
        )
    return {
        "schedule": schedule,
        "starts": tuple(map(tuple, starts)),
        "ends": tuple(map(tuple, ends)),
        "peak_bytes": tuple(fields["peak_bytes"]),
        "transfers": tuple(transfers[number] for number in sorted(transfers)),
    }
