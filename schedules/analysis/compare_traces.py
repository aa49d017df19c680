"""Writes several timelines, such as prediction and measurement, into one Chrome trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.costs import StageCosts
from .chrome_trace import to_trace
from .timeline import Timeline


def side_by_side(
    timelines: Mapping[str, Timeline], labels: Sequence[str] | None = None, costs: StageCosts | None = None
) -> dict[str, Any]:
    """Return one Chrome trace of several timelines, for json.dump; see `Timeline.to_trace`.

    timelines: `Timeline` objects by name. Each becomes a process, and each of its devices a thread.
    labels: the names of the devices of all timelines; "device 0", "device 1", ... if not given.
    costs: of the stages of all timelines, for counters of the bytes that each device stashes.

    `Timeline.from_trace` reads the first one back.
    """
    return to_trace({name: timeline.traced(labels, costs) for name, timeline in timelines.items()})
