"""Writes timelines as one Chrome trace, for ui.perfetto.dev and chrome://tracing.

::

    process "measured"    thread "device 0"        │ 0F₀ ││ 0F₁ │    │ 0B₀ │   slices, coloured by micro-batch
                          arrow                        ↘ from what makes a message to what takes it
                          track "F 0→1"                │ message on its way │
                          "in flight, device 0"    ▁▂▃▂▁ counters: micro-batches, and bytes of stash
    process "predicted"   the same

"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.action import Action, Kind
from ..core.costs import StageCosts
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from ..core.stash import stash_changes
from ..core.timed_schedule import TimedSchedule
from ..core.transfer import Transfer

_MIB = 2**20
# Of events at one time, slices come before the arrows that begin or end in them, and beginnings before ends.
_PHASES = "XCbsfe"
# Perfetto takes the colour of a slice from its name without the digits 0 to 9. So the micro-batch is written with other
# digits, and has its colours on all devices.
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_Event = dict[str, Any]
_Change = tuple[int, float, float]  # device, seconds, by how much a counter changes


class _Span(NamedTuple):
    device: int
    position: int
    action: Action
    start: float
    end: float


def side_by_side(
    timelines: Mapping[str, TimedSchedule],
    labels: Sequence[str] | None = None,
    costs: StageCosts | None = None,
) -> _Event:
    """Return one Chrome trace of several timelines, for json.dump; see `Timeline.to_trace`.

    timelines: by name. Each becomes a process, and each of its devices a thread.
    labels: the names of the devices of all timelines; "device 0", "device 1", ... if not given.
    costs: of the stages of all timelines, for counters of the bytes that each device stashes.

    `Timeline.from_trace` reads the first one back.
    """
    named, timed = [], []
    for process, (name, timeline) in enumerate(timelines.items()):
        names = labels or [f"device {device}" for device in range(timeline.schedule.devices)]
        named += [{**event, "pid": process} for event in _names(name, process, timeline.schedule, names)]
        for event in _events(timeline, names, costs):
            number = {"id": f"{name} {event['id']}"} if "id" in event else {}
            timed.append({**event, **number, "pid": process})
    timed.sort(key=lambda event: (event["ts"], _PHASES.index(event["ph"])))
    return {
        "traceEvents": [*named, *timed],
        "displayTimeUnit": "ms",
        "otherData": {
            "timelines": {
                name: {
                    "schedule": timeline.schedule.to_json(),
                    "peak_bytes": list(timeline.peak_bytes),
                }
                for name, timeline in timelines.items()
            }
        },
    }


def _names(name: str, process: int, schedule: Schedule, labels: Sequence[str]) -> Iterator[_Event]:
    yield {"ph": "M", "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": process}}
    for device, label in enumerate(labels):
        stages = schedule.stages_of(device)
        of = f" (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})" if stages else ""
        yield {"ph": "M", "name": "thread_name", "tid": device, "args": {"name": f"{label}{of}"}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": device, "args": {"sort_index": device}}


def _events(timeline: TimedSchedule, labels: Sequence[str], costs: StageCosts | None) -> Iterator[_Event]:
    """Yield the events of a timeline that have a time."""
    schedule = timeline.schedule
    spans = [
        _Span(device, position, *each)
        for device, row in enumerate(timeline.rows)
        for position, each in enumerate(row)
    ]
    graph = dependencies(schedule)
    yield from map(_slice, spans)
    yield from _arrows(graph, spans)
    yield from _messages(schedule, timeline.transfers)
    yield from _counters("in flight", "micro-batches", _in_flight(spans), labels)
    if costs:
        changes = stash_changes(graph, costs.for_schedule(schedule)) / _MIB
        stashed = (
            (span.device, span.start if change > 0 else span.end, change)
            for span, change in zip(spans, changes.tolist(), strict=True)
            if change
        )
        yield from _counters("stash", "MiB", stashed, labels)


def _slice(span: _Span) -> _Event:
    return {
        "ph": "X",
        "name": _name(span.action),
        "cat": span.action.kind.value,
        "tid": span.device,
        "ts": _microseconds(span.start),
        # Of rounded ends, so that a slice does not end behind the start of the next one.
        "dur": round(_microseconds(span.end) - _microseconds(span.start), 3),
        # What is read back, exactly: microseconds are rounded, and the events are sorted by time.
        "args": {"position": span.position, "start": span.start, "end": span.end},
    }


def _name(action: Action) -> str:
    """Return an action with its micro-batch as a subscript: 0F12 is 0F₁₂."""
    text = str(action)
    head = text.rstrip("0123456789")
    return head + text[len(head) :].translate(_SUBSCRIPTS)


def _microseconds(seconds: float) -> float:
    """Return microseconds, rounded to the nanosecond: viewers have no smaller unit, and files get smaller."""
    return round(seconds * 1e6, 3)


def _arrows(graph: Dependencies, spans: Sequence[_Span]) -> Iterator[_Event]:
    """Yield both ends of an arrow along each message between two devices."""
    for number, (source, target) in enumerate(zip(graph.source.tolist(), graph.target.tolist(), strict=True)):
        sender, receiver = spans[source], spans[target]
        if sender.device == receiver.device:
            continue
        shared = {"name": "message", "cat": "message", "id": number}
        # An arrow from the end itself belongs to no slice, and viewers drop it.
        leaves = sender.end - min(1e-6, (sender.end - sender.start) / 2)
        yield {"ph": "s", **shared, "tid": sender.device, "ts": _microseconds(leaves)}
        yield {"ph": "f", "bp": "e", **shared, "tid": receiver.device, "ts": _microseconds(receiver.start)}


def _messages(schedule: Schedule, transfers: Sequence[Transfer]) -> Iterator[_Event]:
    """Yield each message while it is on its way; those of one edge share a track."""
    for number, transfer in enumerate(transfers):
        shared = {
            "name": f"{transfer.kind} {transfer.source}→{transfer.target}",
            "cat": "transfer",
            "id": number,
            "tid": schedule.device_of[transfer.target],
        }
        yield {"ph": "b", **shared, "ts": _microseconds(transfer.start), "args": transfer._asdict()}
        yield {"ph": "e", **shared, "ts": _microseconds(transfer.end)}


def _in_flight(spans: Iterable[_Span]) -> Iterator[_Change]:
    for span in spans:
        if span.action.kind is Kind.F:
            yield span.device, span.start, 1
        elif span.action.kind in (Kind.B, Kind.W):
            yield span.device, span.end, -1


def _counters(what: str, unit: str, changes: Iterable[_Change], labels: Sequence[str]) -> Iterator[_Event]:
    """Yield the level of each device at each time of a change; a device releases before it adds."""
    level: dict[int, float] = {}
    for device, seconds, change in sorted(changes):
        level[device] = level.get(device, 0) + change
        yield {
            "ph": "C",
            "name": f"{what}, {labels[device]}",
            "tid": 0,
            "ts": _microseconds(seconds),
            "args": {unit: level[device]},
        }
