"""Lists the plans that were not chosen, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...units import format_seconds
from ..costs.layer_ranges import TOLERANCE
from ..plans.plan import Plan
from ..plans.prediction import Alternative
from .candidate import Candidate

_MOST_ROWS = 12  # rows of finished plans


def list_alternatives(
    best: Plan,
    plans: Mapping[Candidate, Plan],
    unfinished: Mapping[Candidate, float],
    failed: Sequence[Candidate],
) -> tuple[Alternative, ...]:
    """Return rows for the plans that were not chosen, the fastest first, then for candidates without a plan.

    A candidate without a plan is listed only if its schedule, number of micro-batches, replicas or stages is not in the
    list yet.

    Args:
        best: the plan that was chosen.
        plans: candidates with their plans.
        unfinished: candidates that were not planned, with a lower bound of their step in seconds.
        failed: candidates for which no plan fits.
    """
    # Candidates that differ in modes or groups of devices share keywords, which give the fastest of their plans.
    fastest: dict[tuple[object, ...], Alternative] = {}
    for candidate, plan in sorted(plans.items(), key=lambda pair: pair[1].predicted.step_seconds):
        row = _row(candidate, _why_slower(best, plan), plan)
        fastest.setdefault(_key(row), row)
    rest = []
    for candidate, bound in sorted(unfinished.items(), key=lambda pair: pair[1]):
        row = _row(candidate, f"at least {format_seconds(bound)} a step")
        rest.append(row)
        planned = fastest.get(_key(row))
        if planned is not None and bound < (planned.step_seconds or 0) * (1 - TOLERANCE):
            del fastest[_key(row)]  # its keywords may give a faster plan than it shows
    rows = [row for row in fastest.values() if not _is_of(row, best)][:_MOST_ROWS]
    shown = {choice for row in rows for choice in _choices(row)}
    for row in (*rest, *(_row(candidate, _why_failed(candidate)) for candidate in failed)):
        if not shown >= _choices(row):
            shown |= _choices(row)
            rows.append(row)
    return tuple(rows)


def _key(row: Alternative) -> tuple[object, ...]:
    return tuple(row.keywords.values())


def _choices(row: Alternative) -> set[tuple[str, str | int]]:
    return {(name, getattr(row, name)) for name in ("schedule", "micro_batches", "replicas", "stages")}


def _is_of(row: Alternative, plan: Plan) -> bool:
    """Return True if the row describes this plan."""
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
