"""The joint search: schedule, micro-batches, recompute and number of stages, each with its best cut, simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from ..costs.layer_ranges import TOLERANCE, ChainCosts
from ..infeasible import Infeasible
from ..partition.replica_groups import groupings
from ..plan_document import Plan
from ..plan_record import SEARCH, Alternative
from ..request import ASYNCHRONOUS, CHUNKS, Request
from ..stage_modes import modes_of
from .best_modes import with_best_modes
from .candidate import Candidate
from .improve_by_simulation import improve_by_simulation
from .search_order import search_order, with_split_critical

_SHOWN = 12


@dataclass(frozen=True)
class Choice:
    """Candidates with one schedule, number of micro-batches and number of replicas.

    Attributes:
        candidates: for each number of devices of a replica, those to try until one has a plan: layers that share a
            parameter stay together, then they may be in different stages.
        first_only: True to take the first number of devices that has a plan; False to choose among all.
        is_other: its stages may offload beside another choice whose stages may not; without an offload it is the same.
    """

    candidates: tuple[tuple[Candidate, ...], ...]
    first_only: bool
    is_other: bool


def search(request: Request) -> Plan | None:
    """Return the plan with the shortest step, with the others as its alternatives; None if none fits.

    The plan of a choice does not depend on the other choices. So a plan is never slower than one whose request allows
    fewer schedules, numbers of micro-batches, replicas or stages.
    """
    found: list[tuple[Candidate, Plan]] = []
    failed: list[Candidate] = []
    waiting = choices(request)
    for place in range(max((len(choice.candidates) for choice in waiting), default=0)):
        tried, waiting = [choice for choice in waiting if place < len(choice.candidates)], []
        for choice in tried:
            ways = choice.candidates[place]
            fastest = min((plan.predicted.step_seconds for _, plan in found), default=math.inf)
            made = None
            if not place or ways[0].shortest_possible_step < fastest:
                made = next(((one, plan) for one in ways if (plan := _plan(one))), None)
                if made and (not choice.is_other or _offloads(made[1])):
                    found.append(made)
                elif made is None and not choice.is_other and (not place or not choice.first_only):
                    failed.append(ways[0])
            if made is None or not choice.first_only:
                waiting.append(choice)
    if not found:
        return None
    best = _best([plan for _, plan in found])
    if request.schedule == SEARCH:
        best = search_order([best, *(plan for _, plan in found)])
    return best.model_copy(update={"alternatives": tuple(_alternatives(best, found, failed))})


def infeasible_candidates(request: Request) -> Iterator[Infeasible]:
    """Explain why each candidate has no plan."""
    for choice in choices(request):
        for candidate in chain.from_iterable(choice.candidates):
            yield candidate.infeasible()


def choices(request: Request) -> list[Choice]:
    """Return everything to choose from: numbers of micro-batches, replicas and schedules."""
    tied = any(info.shares_with for info in request.profile.layers)
    may_split = request.asked.allow_split_ties and request.schedule not in ASYNCHRONOUS
    ways = [False, True] if tied and may_split else [False]
    fingerprint = request.profile.fingerprint
    limits = request.constraints
    found = []
    ways_to_group = [way for replicas in request.replicas for way in groupings(request.cluster, replicas)]
    for count, groups in product(request.micro_batches, ways_to_group):
        measured = request.profile.at(count)
        profile = request.profile.model_copy(update={"costs": (measured,)})
        costs = [
            ChainCosts(
                profile,
                measured,
                limits.colocate,
                limits.no_border,
                split,
                request.gathers_outputs,
                may_relay=request.cluster.links_differ,
            )
            for split in ways
        ]
        most = min(len(groups.cluster), len(profile.layers))
        choices = request.mode_choices
        for name, choice in product(request.schedules, choices):
            own = CHUNKS.get(name)
            chunks = 1 if own is None else request.chunks or own
            if request.chunks not in (None, chunks):
                continue
            numbers = range(1, most + 1)
            candidates = tuple(
                tuple(
                    Candidate(
                        profile,
                        groups,
                        way,
                        name,
                        chunks,
                        devices,
                        choice,
                        modes_of(choices),
                        limits,
                        request.asked,
                        fingerprint,
                    )
                    for way in costs
                )
                for devices in (reversed(numbers) if request.stages is None else numbers)
                if request.stages in (None, "auto", devices * chunks)
            )
            found.append(Choice(candidates, request.stages is None, choice != choices[0]))
    return found


def _plan(candidate: Candidate) -> Plan | None:
    """The plan with the shortest step of a candidate; None if none fits."""
    plan = candidate.best_plan()
    if plan is None:
        return None
    best = with_best_modes(improve_by_simulation(candidate, plan), candidate.modes, candidate.costs)
    return with_split_critical(best, candidate.costs)


def _offloads(plan: Plan) -> bool:
    return any(stage.mode == "offload" for stage in plan.stages)


def _best(plans: Sequence[Plan]) -> Plan:
    """The fastest; of equal ones that with fewest replicas, most devices, fewest chunks, least memory; or the first."""
    fastest = min(made.predicted.step_seconds for made in plans)
    near = [made for made in plans if made.predicted.step_seconds <= fastest * (1 + TOLERANCE)]
    return min(
        near,
        key=lambda made: (
            made.replicas,
            -len({stage.device for stage in made.stages}),
            made.chunks,
            max(made.predicted.memory_bytes),
        ),
    )


def _alternatives(
    best: Plan, found: Sequence[tuple[Candidate, Plan]], failed: Sequence[Candidate]
) -> list[Alternative]:
    """The others: those that fit, the fastest first, then those that do not."""

    def described(candidate: Candidate, why: str, plan: Plan | None = None) -> Alternative:
        return Alternative(
            schedule=candidate.schedule,
            micro_batches=candidate.costs.micro_batches,
            chunks=candidate.chunks,
            replicas=candidate.groups.replicas,
            stages=candidate.stages,
            recompute=candidate.asked.recompute,
            step_seconds=plan and plan.predicted.step_seconds,
            memory_bytes=plan and max(plan.predicted.memory_bytes),
            why=why,
        )

    fitting = [
        described(candidate, _why_slower(best, plan), plan)
        for candidate, plan in sorted(found, key=lambda one: one[1].predicted.step_seconds)
        if plan is not best
    ]
    others = [
        described(candidate, candidate.impossible_reason or "does not fit the memory of the devices")
        for candidate in failed
        if not candidate.impossible_reason or candidate.schedule != best.schedule
    ]
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
