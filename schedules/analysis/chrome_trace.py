"""Writes timelines as one Chrome trace, for ui.perfetto.dev and chrome://tracing.

::

    process "measured"    thread "device 0"        │ 0F₀ ││ 0F₁ │    │ 0B₀ │   slices, coloured by micro-batch
                          arrow                        ↘ from what makes a message to what takes it
                          track "F 0→1"                │ message on its way │
                          "in flight, device 0"    ▁▂▃▂▁ counters: micro-batches, and bytes of stash
    process "predicted"   the same

"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.action import COMMUNICATION, Action, Kind
from ..core.costs import StageCosts
from ..core.dependencies import Dependencies, dependencies
from ..core.schedule import Schedule
from ..core.stash import stash_changes
from ..core.transfer import Transfer

_MIB = 2**20
_ROWS = ("", ": send", ": receive")  # of each device
_SENDS = (Kind.SEND_F, Kind.SEND_B)
# Of events at one time, slices come before the arrows that begin or end in them, and beginnings before ends.
_PHASES = "XCbsfe"
# chrome://tracing has names for colours and no values. Perfetto ignores them: it takes the colour from a slice's name
# without its digits 0 to 9. So the micro-batch is written with other digits, and has its colours on all devices.
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_COLOURS = (
    "rail_response",
    "rail_idle",
    "rail_load",
    "detailed_memory_dump",
    "startup",
    "background_memory_dump",
    "rail_animation",
    "thread_state_unknown",
)
_Event = dict[str, Any]


class Traced(NamedTuple):
    """A timeline to write to a trace. Fields not listed here are those of `Timeline`.

    labels: the names of the devices; None for "device 0", "device 1", ...
    costs: adds a counter of the stashed bytes of each device; None for no counter.
    """

    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    peak_bytes: Sequence[float]
    peak_at: Sequence[float]
    transfers: Sequence[Transfer]
    labels: Sequence[str] | None = None
    costs: StageCosts | None = None


class _Span(NamedTuple):
    device: int
    position: int
    action: Action
    start: float
    end: float


def to_trace(timelines: Mapping[str, Traced]) -> _Event:
    """Return one Chrome trace as a JSON object; each timeline is a process, in order, and each device a thread."""
    named, timed = [], []
    for process, (name, traced) in enumerate(timelines.items()):
        spans = [
            _Span(device, position, *each)
            for device, row in enumerate(
                zip(traced.schedule.actions, traced.starts, traced.ends, strict=True)
            )
            for position, each in enumerate(zip(*row, strict=True))
        ]
        found = dependencies(traced.schedule)
        labels = traced.labels or [f"device {device}" for device in range(traced.schedule.devices)]
        named += [
            {**event, "pid": process} for event in _names(name, process, traced.schedule, spans, labels)
        ]
        for event in (
            *map(_slice, spans),
            *_arrows(found, spans),
            *_messages(traced.schedule, traced.transfers),
            *_in_flight(spans, labels),
            *(_stash(found, spans, labels, traced.costs) if traced.costs else ()),
        ):
            number = {"id": f"{name} {event['id']}"} if "id" in event else {}
            timed.append({**event, **number, "pid": process})
    timed.sort(key=lambda event: (event["ts"], _PHASES.index(event["ph"])))
    return {
        "traceEvents": [*named, *timed],
        "displayTimeUnit": "ms",
        "otherData": {
            "timelines": {
                name: {
                    "schedule": traced.schedule.to_json(),
                    "peak_bytes": list(traced.peak_bytes),
                    "peak_at": list(traced.peak_at),
                }
                for name, traced in timelines.items()
            }
        },
    }


def _names(
    name: str, process: int, schedule: Schedule, spans: Sequence[_Span], labels: Sequence[str]
) -> Iterator[_Event]:
    yield {"ph": "M", "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": process}}
    used = {_thread(span) for span in spans}
    for device, label in enumerate(labels):
        stages = schedule.stages_of(device)
        of = f" (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})" if stages else ""
        for row, what in enumerate(_ROWS):
            thread = len(_ROWS) * device + row
            if row and thread not in used:
                continue
            yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": f"{label}{what or of}"}}
            yield {"ph": "M", "name": "thread_sort_index", "tid": thread, "args": {"sort_index": thread}}


def _slice(span: _Span) -> _Event:
    micro_batch = span.action.leaves[0].micro_batch
    colour = {} if micro_batch is None else {"cname": _COLOURS[micro_batch % len(_COLOURS)]}
    return {
        "ph": "X",
        "name": _name(span.action),
        "cat": span.action.kind.value,
        **colour,
        "tid": _thread(span),
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


def _arrows(found: Dependencies, spans: Sequence[_Span]) -> Iterator[_Event]:
    """An arrow along each message between two devices."""
    for number, (source, target) in enumerate(zip(found.source.tolist(), found.target.tolist(), strict=True)):
        sender, receiver = spans[source], spans[target]
        if sender.device == receiver.device:
            continue
        leaves = sender.start if sender.action.kind in COMMUNICATION else _within(sender)
        arrives = _within(receiver) if receiver.action.kind in COMMUNICATION else receiver.start
        for phase, span, seconds in (("s", sender, leaves), ("f", receiver, arrives)):
            yield {
                "ph": phase,
                **({"bp": "e"} if phase == "f" else {}),
                "name": "message",
                "cat": "message",
                "id": number,
                "tid": _thread(span),
                "ts": _microseconds(seconds),
            }


def _within(span: _Span) -> float:
    """Return a time just before the end: an arrow at the end itself belongs to no slice, and viewers drop it."""
    return span.end - min(1e-6, (span.end - span.start) / 2)


def _messages(schedule: Schedule, transfers: Sequence[Transfer]) -> Iterator[_Event]:
    """Each message while it is on its way; those of one edge share a track."""
    for number, transfer in enumerate(transfers):
        row = len(_ROWS) * schedule.device_of[transfer.target]
        for phase, seconds in (("b", transfer.start), ("e", transfer.end)):
            yield {
                "ph": phase,
                "name": f"{transfer.kind} {transfer.source}→{transfer.target}",
                "cat": "transfer",
                "id": number,
                "tid": row,
                "ts": _microseconds(seconds),
                **({"args": transfer._asdict()} if phase == "b" else {}),
            }


def _in_flight(spans: Sequence[_Span], labels: Sequence[str]) -> Iterator[_Event]:
    """How many micro-batches are in flight on each device, whenever that changes."""
    changes = []
    for span in spans:
        for leaf in span.action.leaves:
            if leaf.kind is Kind.F:
                changes.append((span.device, span.start, 1))
            elif leaf.kind in (Kind.B, Kind.W):
                changes.append((span.device, span.end, -1))
    for device, seconds, level in _levels(changes):
        yield _counter(f"in flight, {labels[device]}", "micro-batches", seconds, level)


def _stash(
    found: Dependencies, spans: Sequence[_Span], labels: Sequence[str], costs: StageCosts
) -> Iterator[_Event]:
    """What the stages of each device keep for their backwards, with the sizes of the costs."""
    changes = []
    for owner, change in zip(found.owner.tolist(), stash_changes(found, costs).tolist(), strict=True):
        span = spans[owner]
        if change:
            changes.append((span.device, span.start if change > 0 else span.end, change))
    for device, seconds, level in _levels(changes):
        yield _counter(f"stash, {labels[device]}", "MiB", seconds, level / _MIB)


def _levels(changes: list[tuple[int, float, float]]) -> Iterator[tuple[int, float, float]]:
    """Yield device, time and sum at each time of a change; a device releases before it adds."""
    level: dict[int, float] = {}
    for device, seconds, change in sorted(changes):
        level[device] = level.get(device, 0) + change
        yield device, seconds, level[device]


def _counter(name: str, unit: str, seconds: float, level: float) -> _Event:
    return {"ph": "C", "name": name, "tid": 0, "ts": _microseconds(seconds), "args": {unit: level}}


def _thread(span: _Span) -> int:
    row = 0
    if span.action.kind in COMMUNICATION:
        row = 1 if span.action.kind in _SENDS else 2
    return len(_ROWS) * span.device + row


def device_of(thread: int) -> int:
    """Return the device of a thread of a trace."""
    return thread // len(_ROWS)
