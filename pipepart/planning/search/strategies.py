"""The joint search: schedule, micro-batches, recompute and number of stages, each with its best cut, simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..costs.layer_ranges import ChainCosts
from ..feasibility.infeasible import Infeasible
from ..partition.replica_groups import group_devices
from ..plan_document import Plan
from ..plan_record import Alternative
from ..request import ASYNCHRONOUS, CHUNKS, Request
from ..stage_plan import TOLERANCE
from .candidate import Candidate
from .improve_by_simulation import improve_by_simulation
from .order_text import SEARCH
from .search_order import search_order
from .split_critical import with_split_critical

_Tried = list[tuple[Candidate, int, Plan | None]]

_SHOWN = 12


def search(request: Request) -> Plan | None:
    """Return the plan with the shortest step, with the others as its alternatives; None if none fits."""
    for group in candidate_groups(request):
        tried = [(candidate, devices, candidate.best_plan(devices)) for candidate, devices in group]
        found = [(candidate, devices, made) for candidate, devices, made in tried if made]
        if found:
            best = improve_by_simulation(_best([made for *_, made in found]), found)
            best, tried = _split(best, tried)
            if request.schedule == SEARCH:
                best = search_order([best, *(made for *_, made in tried if made)])
            return best.model_copy(update={"alternatives": tuple(_alternatives(best, tried))})
    return None


def infeasible_candidates(request: Request) -> Iterator[Infeasible]:
    """Explain why each candidate has no plan."""
    for group in candidate_groups(request):
        for candidate, devices in group:
            yield candidate.infeasible(devices)


def _candidates(request: Request, *, allow_split_ties: bool) -> Iterator[Candidate]:
    groupings = [group_devices(request.cluster, replicas) for replicas in request.replicas]
    constraints = request.constraints
    for count, groups in itertools.product(request.micro_batches, groupings):
        measured = request.profile.at(count)
        profile = request.profile.model_copy(update={"costs": (measured,)})
        costs = ChainCosts(profile, measured, constraints.colocate, constraints.no_border, allow_split_ties)
        for name in request.schedules:
            own = CHUNKS.get(name)
            chunks = 1 if own is None else request.chunks or own
            if request.chunks in (None, chunks):
                yield Candidate(profile, groups, costs, name, chunks, request.recompute, constraints)


def candidate_groups(request: Request) -> Iterator[list[tuple[Candidate, int]]]:
    """Candidates with numbers of devices for a replica. A group is tried if none before it has a plan."""
    tied = any(info.shares_with for info in request.profile.layers)
    may_split = request.allow_split_ties and request.schedule not in ASYNCHRONOUS
    ways = [False, True] if tied and may_split else [False]
    candidates = {split: list(_candidates(request, allow_split_ties=split)) for split in ways}
    layers = len(request.profile.layers)
    most = [min(len(candidate.cluster), layers) for candidate in candidates[False]]
    if request.stages is None:
        for fewer, split in itertools.product(range(max(most, default=0)), ways):
            pairs = zip(candidates[split], most, strict=True)
            yield [(candidate, count - fewer) for candidate, count in pairs if count > fewer]
        return
    for split in ways:
        yield [
            (candidate, devices)
            for candidate, count in zip(candidates[split], most, strict=True)
            for devices in range(1, count + 1)
            if request.stages in ("auto", devices * candidate.chunks)
        ]


def _best(plans: Sequence[Plan]) -> Plan:
    """The fastest; of equal ones that with fewest replicas, then fewest chunks, then least memory, then the first."""
    fastest = min(made.predicted.step_seconds for made in plans)
    near = [made for made in plans if made.predicted.step_seconds <= fastest * (1 + TOLERANCE)]
    return min(near, key=lambda made: (made.replicas, made.chunks, max(made.predicted.memory_bytes)))


def _split(best: Plan, tried: _Tried) -> tuple[Plan, _Tried]:
    """Split backwards on the critical path of all plans, which may make another one the fastest."""
    made = {id(plan): with_split_critical(plan) for plan in (best, *(plan for *_, plan in tried if plan))}
    best = made[id(best)]
    tried = [(candidate, devices, made[id(plan)] if plan else None) for candidate, devices, plan in tried]
    limit = best.predicted.step_seconds * (1 - TOLERANCE)
    quicker = [plan for *_, plan in tried if plan and plan.predicted.step_seconds < limit]
    return _best(quicker) if quicker else best, tried


def _alternatives(best: Plan, tried: _Tried) -> list[Alternative]:
    """The others: those that fit, the fastest first, then those that do not."""
    fitting, others = [], []
    for candidate, devices, made in tried:
        if made is best:
            continue
        described = Alternative(
            schedule=candidate.schedule,
            micro_batches=candidate.costs.micro_batches,
            chunks=candidate.chunks,
            replicas=candidate.groups.replicas,
            stages=devices * candidate.chunks,
            why="does not fit the memory of the devices",
        )
        if made is None:
            reason = candidate.impossible_reason(devices)
            if not reason or candidate.schedule != best.schedule:
                others.append(described.model_copy(update={"why": reason or described.why}))
            continue
        figures = {
            "step_seconds": made.predicted.step_seconds,
            "memory_bytes": max(made.predicted.memory_bytes),
            "why": _why_slower(best, made),
        }
        fitting.append(described.model_copy(update=figures))
    fitting.sort(key=lambda other: other.step_seconds or 0.0)
    return [*fitting, *others][:_SHOWN]


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
