"""Checks traces against the trace-event format, as Perfetto and chrome://tracing read it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

# What each phase must have beside ph, name and pid.
_FIELDS = {
    "M": {"args"},
    "X": {"tid", "ts", "dur", "cat", "args"},
    "C": {"ts", "args"},
    "s": {"tid", "ts", "cat", "id"},
    "f": {"tid", "ts", "cat", "id", "bp"},
    "b": {"ts", "cat", "id"},
    "e": {"ts", "cat", "id"},
}
_SLACK = 1e-6  # microseconds: times are rounded when they are multiplied


def check_trace_format(trace: Mapping[str, Any]) -> Counter[str]:
    """Check a whole trace, and return how many events it has of each phase."""
    events = trace["traceEvents"]
    for event in events:
        missing = {"name", "pid", *_FIELDS[event["ph"]]} - event.keys()
        assert not missing, (event, missing)
        assert event.get("dur", 0) >= 0, event
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert all(event["ph"] == "M" for event in events[: len(events) - len(times)])
    _check_names(events)
    slices = _check_slices(events)
    _check_pairs(events, "s", "f", slices)
    _check_pairs(events, "b", "e", None)
    for event in events:
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) and value >= 0 for value in event["args"].values())
    return Counter(event["ph"] for event in events)


def _check_names(events: list[dict[str, Any]]) -> None:
    """Every process and thread that has slices has one name and one place in the order."""
    threads = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    for what, wanted in (("thread", threads), ("process", {(pid,) for pid, _ in threads})):
        for field, key in ((f"{what}_name", "name"), (f"{what}_sort_index", "sort_index")):
            found = [
                (event["pid"], event["tid"]) if what == "thread" else (event["pid"],)
                for event in events
                if event["name"] == field and key in event["args"]
            ]
            assert len(found) == len(set(found))
            assert wanted <= set(found)


def _check_slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Slices of a thread do not overlap."""
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in slices.values():
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - _SLACK
    return slices


def _check_pairs(
    events: list[dict[str, Any]],
    first: str,
    second: str,
    slices: Mapping[tuple[int, int], list[tuple[float, float]]] | None,
) -> None:
    """Each begin has one end, which is not earlier; ends of arrows are within a slice of their thread."""
    begins, ends = (
        {(event["cat"], event["id"]): event for event in events if event["ph"] == phase}
        for phase in (first, second)
    )
    assert len(begins) == sum(event["ph"] == first for event in events)
    assert len(ends) == sum(event["ph"] == second for event in events)
    assert begins.keys() == ends.keys()
    for key, begin in begins.items():
        assert begin["ts"] <= ends[key]["ts"] + _SLACK, (begin, ends[key])
        assert begin["name"] == ends[key]["name"]
        for event in (begin, ends[key]) if slices is not None else ():
            assert slices is not None
            spans = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] < end or start == event["ts"] == end for start, end in spans), (
                event
            )
