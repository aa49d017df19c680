"""Writes a timeline as a Chrome trace, for chrome://tracing and ui.perfetto.dev, and reads it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.action import COMMUNICATION, Action, Kind, ScheduleError
from ..core.dependencies import dependencies
from ..core.schedule import Schedule
from ..core.transfer import Transfer

_MICROSECONDS = 1e6
_THREADS = {"compute": 0, "send": 1, "receive": 2}
ROWS = len(_THREADS)  # of each device, where it is a thread of a process that several devices share
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_Event = dict[str, Any]


def to_trace(
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    peak_bytes: Sequence[float],
    peak_at: Sequence[float],
    transfers: Sequence[Transfer],
) -> _Event:
    """Return the trace of a timeline with these fields as one JSON object; `Timeline.to_trace` says what it shows."""
    spans = [
        (device, action, start, end)
        for device, row in enumerate(zip(schedule.actions, starts, ends, strict=True))
        for action, start, end in zip(*row, strict=True)
    ]
    events = [
        *_names(schedule),
        *(_slice(device, action, start, end) for device, action, start, end in spans),
        *_arrows(schedule, spans),
        *_messages(schedule, transfers),
        *_counters(spans),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": schedule.to_json(),
            "peak_bytes": list(peak_bytes),
            "peak_at": list(peak_at),
        },
    }


def from_trace(trace: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that `to_trace` wrote, exactly, in the same order.

    Raises ScheduleError if the trace was not written by `to_trace` or `side_by_side`.
    """
    trace = _alone(trace)
    other = trace.get("otherData", {})
    if "schedule" not in other:
        raise ScheduleError(
            "this trace has no schedule in its otherData: it was not written by Timeline.to_trace"
        )
    schedule = Schedule.from_json(other["schedule"])
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    starts: list[list[float]] = [[] for _ in schedule.actions]
    ends: list[list[float]] = [[] for _ in schedule.actions]
    for event in slices:
        starts[event["pid"]].append(event["args"]["start"])
        ends[event["pid"]].append(event["args"]["end"])
    return (
        schedule,
        tuple(map(tuple, starts)),
        tuple(map(tuple, ends)),
        tuple(other["peak_bytes"]),
        tuple(other["peak_at"]),
        tuple(_transfer(event["args"]) for event in trace["traceEvents"] if event["ph"] == "b"),
    )


def _names(schedule: Schedule) -> Iterator[_Event]:
    for device in range(schedule.devices):
        stages = ", ".join(map(str, schedule.stages_of(device)))
        yield {
            "ph": "M",
            "name": "process_name",
            "pid": device,
            "args": {"name": f"device {device} (stage {stages})"},
        }
        for name, thread in _THREADS.items():
            yield {"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": name}}


def _slice(device: int, action: Action, start: float, end: float) -> _Event:
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.value,
        "pid": device,
        "tid": _thread(action),
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": {"start": start, "end": end},
    }


def _arrows(schedule: Schedule, spans: Sequence[tuple[int, Action, float, float]]) -> Iterator[_Event]:
    """An arrow along each message between two devices."""
    found = dependencies(schedule)
    for number, (source, target) in enumerate(zip(found.source.tolist(), found.target.tolist(), strict=True)):
        (sender, sent, departure, made), (receiver, received, start, end) = spans[source], spans[target]
        if sender == receiver:
            continue
        leaves = departure if sent.kind in COMMUNICATION else made
        arrives = end if received.kind in COMMUNICATION else start
        for phase, device, action, seconds in (
            ("s", sender, sent, leaves),
            ("f", receiver, received, arrives),
        ):
            yield {
                "ph": phase,
                **({"bp": "e"} if phase == "f" else {}),
                "name": "message",
                "cat": "message",
                "id": number,
                "pid": device,
                "tid": _thread(action),
                "ts": seconds * _MICROSECONDS,
            }


def _messages(schedule: Schedule, transfers: Sequence[Transfer]) -> Iterator[_Event]:
    """Each message while it is on its way."""
    for number, transfer in enumerate(transfers):
        for phase, seconds in (("b", transfer.start), ("e", transfer.end)):
            yield {
                "ph": phase,
                "name": f"{Action(transfer.kind, transfer.target, transfer.micro_batch)} from {transfer.source}",
                "cat": "transfer",
                "id": number,
                "pid": schedule.device_of[transfer.target],
                "ts": seconds * _MICROSECONDS,
                "args": transfer._asdict() if phase == "b" else {},
            }


def _transfer(fields: Mapping[str, Any]) -> Transfer:
    return Transfer(**{**fields, "kind": Kind(fields["kind"])})


def _counters(spans: Sequence[tuple[int, Action, float, float]]) -> Iterator[_Event]:
    """How many micro-batches are in flight on each device, whenever that changes."""
    changes = []
    for device, action, start, end in spans:
        for leaf in action.leaves:
            if leaf.kind is Kind.F:
                changes.append((device, start, 1))
            elif leaf.kind in (Kind.B, Kind.W):
                changes.append((device, end, -1))
    live: dict[int, int] = {}
    for device, seconds, change in sorted(changes):
        live[device] = live.get(device, 0) + change
        yield {
            "ph": "C",
            "name": "live activations",
            "pid": device,
            "ts": seconds * _MICROSECONDS,
            "args": {"micro-batches": live[device]},
        }


def _thread(action: Action) -> int:
    if action.kind not in COMMUNICATION:
        return _THREADS["compute"]
    return _THREADS["send" if action.kind in _SENDS else "receive"]


def _alone(trace: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first timeline of a trace of several as a trace of its own; any other trace as it is."""
    timelines = trace.get("otherData", {}).get("timelines")
    if not timelines:
        return trace
    events = [
        {**event, "pid": event["tid"] // ROWS, "tid": event["tid"] % ROWS}
        for event in trace["traceEvents"]
        if event["pid"] == 0 and event["ph"] in "Xb"
    ]
    return {"traceEvents": events, "otherData": next(iter(timelines.values()))}
