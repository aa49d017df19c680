"""Lists the plans that were not chosen, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...units import format_seconds
from ..costs.layer_ranges import TOLERANCE
from ..costs.stage_memory import RecomputeChoice
from ..plans.plan import Plan
from ..plans.prediction import Alternative
from ..plans.searched_order import SEARCH
from .candidate import Candidate
from .named import Named

_PLANNED = 12  # rows with a step


def list_alternatives(
    best: Plan, named: Sequence[Named], joint: Iterable[Plan] = ()
) -> tuple[Alternative, ...]:
    """Return the others: those with a step, the fastest first, then those that were not planned to the end.

    Of the latter, those are shown whose schedule, number of micro-batches, replicas or stages is not shown yet.

    Args:
        best: the plan that was chosen.
        named: the plans under named schedules, of each part of the request.
        joint: those of the joint search.
    """
    planned = [_row(one, _why_slower(best, plan), plan) for own in named for one, plan in own.plans]
    planned += [_searched_row(plan, _why_slower(best, plan)) for plan in joint]
    slower = sorted(
        ((at_least, ways[0]) for own in named for ways, at_least in own.slower), key=lambda one: one[0]
    )
    others = [(_row(one, f"at least {format_seconds(at_least)} a step"), one) for at_least, one in slower]
    # Keywords may allow several candidates, with the choice "auto" those of all modes. Where one of them may be faster,
    # as it was not planned to the end, the row is not what the keywords give.
    least: dict[tuple[object, ...], float] = {}
    for row, seconds in [
        *((row, row.step_seconds or 0.0) for row in planned),
        *((row, at_least) for (row, _), (at_least, _) in zip(others, slower, strict=True)),
    ]:
        for key in (_key(row), _key(row.model_copy(update={"recompute": "auto"}))):
            least[key] = min(seconds, least.get(key, math.inf))
    planned = [
        row
        for row in planned
        if not _is_of(row, best) and (row.step_seconds or 0.0) <= least[_key(row)] * (1 + TOLERANCE)
    ]
    planned.sort(key=lambda row: row.step_seconds or 0.0)
    others += [(_row(one, _why_failed(one)), one) for own in named for one in own.failed]
    fastest: dict[tuple[object, ...], Alternative] = {}
    for row in planned:  # one of two sets of modes, or of two ways to group the devices
        fastest.setdefault(_key(row), row)
    found = list(fastest.values())[:_PLANNED]
    seen = {part for row in found for part in _parts(row)}
    for row, one in others:
        if not seen >= _parts(row) and not one.impossible_reason:
            seen |= _parts(row)
            found.append(row)
    return tuple(found)


def _key(row: Alternative) -> tuple[object, ...]:
    return tuple(row.keywords.values())


def _parts(row: Alternative) -> set[tuple[str, str | int]]:
    names = ("schedule", "micro_batches", "replicas", "stages")
    return {(name, getattr(row, name)) for name in names}


def _is_of(row: Alternative, plan: Plan) -> bool:
    """Return True if the row is that of the plan itself."""
    own = (plan.schedule, plan.micro_batches, plan.replicas, len(plan.stages), plan.predicted.step_seconds)
    return own == (row.schedule, row.micro_batches, row.replicas, row.stages, row.step_seconds)


def _row(candidate: Candidate, why: str, plan: Plan | None = None) -> Alternative:
    return Alternative(
        schedule=candidate.schedule,
        micro_batches=candidate.costs.micro_batches,
        chunks=candidate.chunks,
        replicas=candidate.groups.replicas,
        stages=candidate.stages,
        recompute=_recompute(candidate),
        step_seconds=plan and plan.predicted.step_seconds,
        memory_bytes=plan and max(plan.predicted.memory_bytes),
        why=why,
    )


def _recompute(candidate: Candidate) -> RecomputeChoice:
    """Return the keyword that the candidate stands for."""
    choice = candidate.choice
    return candidate.asked.recompute if choice in ("offload", "stash") else choice


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
