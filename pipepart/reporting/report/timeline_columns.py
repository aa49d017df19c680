"""The columns of a timeline for the report's scripts: its actions, and the inputs that each one waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from schedules import Kind, Schedule, Timeline
from schedules.analysis.arrivals import arrivals
from schedules.core.dependencies import Dependencies, dependencies

from ...planning import Plan

_TICKS = 2**32 - 1  # a span in the smallest steps that 32 bits hold: a nanosecond is exact in a step of 4 s


@dataclass(frozen=True)
class TimelineColumns:
    """A timeline as columns, its actions numbered device after device.

    Attributes:
        columns: ``start`` and ``end`` in ticks, ``code``, ``stage`` and ``micro_batch`` (-1 for none) of each action.
            Of each input from another device or a host, by the action that takes it: ``source`` and ``target`` action,
            ``arrived`` in ticks, and ``size``, its place in ``sizes``.
        offsets: device d has the actions from ``offsets[d]`` up to ``offsets[d + 1]``.
        sizes: the different numbers of bytes of an input.
    """

    columns: Mapping[str, np.ndarray]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def timeline_columns(timeline: Timeline, plan: Plan, span: float) -> TimelineColumns:
    """Return a timeline as columns.

    Args:
        timeline: simulated or measured.
        plan: that it is a step of; tells how large messages are.
        span: seconds that the largest tick stands for.
    """
    found = dependencies(timeline.schedule)
    starts, ends = (np.array([at for row in rows for at in row]) for rows in (timeline.starts, timeline.ends))
    inputs, sizes = _inputs(timeline, plan, found, ends)
    columns = {
        "start": ticks(starts, timeline, span),
        "end": ticks(ends, timeline, span),
        **_actions(found),
    }
    inputs["arrived"] = ticks(inputs["arrived"], timeline, span)
    return TimelineColumns({**columns, **inputs}, found.offsets, sizes)


def ticks(seconds: np.ndarray, timeline: Timeline, span: float) -> np.ndarray:
    """Convert times to integer ticks since the first start of a timeline; the largest tick is ``span`` seconds."""
    origin = min((min(row) for row in timeline.starts if len(row)), default=0.0)
    scale = _TICKS / span if span else 0.0
    return np.clip(np.rint((seconds - origin) * scale), 0, _TICKS).astype(np.uint32)


def _actions(found: Dependencies) -> dict[str, np.ndarray]:
    return {
        "code": found.code.astype(np.uint8),
        "stage": found.stage.astype(np.int32),
        "micro_batch": found.micro_batch.astype(np.int32),
    }


def _inputs(
    timeline: Timeline, plan: Plan, found: Dependencies, ends: np.ndarray
) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """Return the inputs that come from another device or from a host, by the action that takes them, and the sizes."""
    schedule = timeline.schedule
    home = np.asarray(schedule.device_of)
    from_afar = (home[found.source_stage] != home[found.target_stage]) | found.is_copy
    kept = np.flatnonzero(from_afar)
    kept = kept[np.argsort(found.target[kept], kind="stable")]
    known = arrivals(timeline, found)
    arrived = np.array([np.nan if at is None else at for at in known], dtype=np.float64)[kept]
    source = found.source[kept]
    size_of = _message_bytes(timeline, plan)
    pairs = zip(found.source_stage[kept].tolist(), found.target_stage[kept].tolist(), strict=True)
    sizes, place = np.unique(
        np.array([size_of.get(pair, 0) for pair in pairs], dtype=np.int64), return_inverse=True
    )
    inputs = {
        "source": source.astype(np.uint32),
        "target": found.target[kept].astype(np.uint32),
        "arrived": np.where(np.isnan(arrived), ends[source], arrived),
        "size": place.astype(np.uint16),
    }
    return inputs, tuple(sizes.tolist())


def _message_bytes(timeline: Timeline, plan: Plan) -> dict[tuple[int, int], int]:
    """Return the bytes of a message between two stages, as the timeline has them, else as the plan has them.

    Copies of a stage send each other their gradients.
    """
    schedule = timeline.schedule
    found: dict[tuple[int, int], int] = {}
    for stage, own in enumerate(plan.all_stages):
        following = schedule.next_stage(stage)
        if following is not None:
            found[stage, following] = found[following, stage] = own.output_bytes
        for copy in range(stage % schedule.model_stages, schedule.stages, schedule.model_stages):
            if copy != stage:
                found[stage, copy] = own.gradient_bytes
    return found | {
        (each.source, each.target): round(each.bytes) for each in timeline.transfers if each.bytes
    }


def kinds_of(schedule: Schedule) -> list[Kind]:
    """Return the kinds of action that a schedule has, in the order in which :class:`Kind` lists them."""
    present = {action.kind for row in schedule.actions for action in row}
    return [kind for kind in Kind if kind in present]
