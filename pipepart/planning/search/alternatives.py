"""Lists the plans that were not chosen, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...units import format_seconds
from ..costs.layer_ranges import TOLERANCE
from ..plans.plan import Plan
from ..plans.prediction import Alternative
from ..plans.searched_order import SEARCH
from .candidate import Candidate
from .named import Named

_PLANNED = 12  # rows with a step


def list_alternatives(
    best: Plan, named: Sequence[Named], joint: Iterable[Plan] = ()
) -> tuple[Alternative, ...]:
    """Return the other plans, the fastest first, then some that were not planned to the end.

    Of the latter those are shown whose schedule, number of micro-batches, replicas or stages is not shown yet.

    Args:
        best: the plan that was chosen.
        named: the plans under named schedules, of each part of the request.
        joint: those of the joint search.
    """  # fmt: skip
    unfinished = [
        (_row(own, f"at least {format_seconds(least)} a step"), least)
        for one in named
        for own, least in one.slower
    ]
    unfinished.sort(key=lambda pair: pair[1])
    planned = [_row(own, _why_slower(best, plan), plan) for one in named for own, plan in one.plans]
    planned += [_searched_row(plan, _why_slower(best, plan)) for plan in joint]
    planned.sort(key=lambda row: row.step_seconds or 0.0)
    # Candidates can share keywords. A row is hidden if an unfinished candidate with its keywords may be faster.
    least: dict[tuple[object, ...], float] = {}
    for row, seconds in reversed(unfinished):
        least[_key(row)] = seconds
    fastest: dict[tuple[object, ...], Alternative] = {}
    for row in planned:
        if (row.step_seconds or 0.0) <= least.get(_key(row), math.inf) * (1 + TOLERANCE):
            fastest.setdefault(_key(row), row)
    rows = [row for row in fastest.values() if not _is_of(row, best)][:_PLANNED]
    shown = {choice for row in rows for choice in _choices(row)}
    failed = [
        (_row(own, _why_failed(own)), math.inf)
        for one in named
        for own in one.failed
        if not own.impossible_reason
    ]
    for row, _ in (*unfinished, *failed):
        if not shown >= _choices(row):
            shown |= _choices(row)
            rows.append(row)
    return tuple(rows)


def _key(row: Alternative) -> tuple[object, ...]:
    return tuple(row.keywords.values())


def _choices(row: Alternative) -> set[tuple[str, str | int]]:
    return {(name, getattr(row, name)) for name in ("schedule", "micro_batches", "replicas", "stages")}


def _is_of(row: Alternative, plan: Plan) -> bool:
    """Return True if the row is that of the plan itself."""
    figures = plan.schedule, plan.micro_batches, plan.replicas, len(plan.stages), plan.predicted.step_seconds
    return figures == (row.schedule, row.micro_batches, row.replicas, row.stages, row.step_seconds)


def _row(candidate: Candidate, why: str, plan: Plan | None = None) -> Alternative:
    return Alternative(
        schedule=candidate.schedule,
        micro_batches=candidate.costs.micro_batches,
        chunks=candidate.chunks,
        replicas=candidate.part.groups.replicas,
        stages=candidate.stages,
        recompute=candidate.part.request.asked.recompute,
        step_seconds=plan and plan.predicted.step_seconds,
        memory_bytes=plan and max(plan.predicted.memory_bytes),
        why=why,
    )


def _searched_row(plan: Plan, why: str) -> Alternative:
    return Alternative(
        schedule=SEARCH,
        micro_batches=plan.micro_batches,
        chunks=1,
        replicas=plan.replicas,
        stages=len(plan.stages),
        recompute=plan.constraints.recompute,
        step_seconds=plan.predicted.step_seconds,
        memory_bytes=max(plan.predicted.memory_bytes),
        why=why,
    )


def _why_failed(candidate: Candidate) -> str:
    if candidate.has_cuts:
        return "does not fit the memory of the devices"
    return "shared parameters or constraints allow no cut into so many stages"


def _why_slower(best: Plan, other: Plan) -> str:
    mine, its = best.predicted, other.predicted
    if its.step_seconds <= mine.step_seconds * (1 + TOLERANCE):
        more = max(its.memory_bytes) - max(mine.memory_bytes)
        return "as fast, with more memory" if more > 0 else "as fast, and less simple"
    reasons = []
    if its.bubble > mine.bubble + 0.005:
        reasons.append(f"devices idle {its.bubble:.0%} of the step, not {mine.bubble:.0%}")
    if its.bottleneck_seconds * other.micro_batches > mine.bottleneck_seconds * best.micro_batches * 1.005:
        ratio = its.bottleneck_seconds * other.micro_batches / (mine.bottleneck_seconds * best.micro_batches)
        reasons.append(f"its busiest device has {ratio - 1:.1%} more to do")
    slower = f"{its.step_seconds / mine.step_seconds - 1:.1%} slower" if mine.step_seconds else "slower"
    return ": ".join([slower, ", ".join(reasons)]) if reasons else slower
