"""The joint choice: schedule, micro-batches, recompute, number of stages; each with its best cut, and simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...cluster import Cluster
from ...profiling import Costs, Profile
from ..constraints import Constraints
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import RecomputeChoice
from ..feasibility.infeasible import Infeasible
from ..partition.local_search import improve_by_simulation
from ..partition.replica_groups import group_devices
from ..plan_document import Alternative, Plan
from .candidate import ASYNCHRONOUS, CHUNKS, Candidate
from .order_text import SEARCH
from .search_order import search_order
from .split_critical import with_split_critical

# What "auto" tries, the simplest first: it wins where others are not faster. Not "looped-bfs", which adds up gradients
# in another order than micro-batches do, so that the last bits of the numbers would hang on what was quicker to time.
AUTO = ("1f1b", "gpipe", "eager-1f1b", "interleaved-1f1b", "hanayo", "sequential")
# Those that put weight gradients off.
SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-zb")

_Tried = list[tuple[Candidate, int, Plan | None]]

_EQUAL = 1e-9
_SHOWN = 12


@dataclass(frozen=True)
class Request:
    """What is asked of the planner, checked.

    Attributes:
        profile: the layers and what they cost.
        cluster: the devices.
        schedule: a name, ``"auto"``, or ``"search"`` for an order that is searched for the stages.
        micro_batches: numbers to choose from.
        recompute: what stages may do.
        stages: their number; None for as many as devices, or fewer where only fewer fit.
        chunks: stages of each device; None for the schedule's own number.
        replicas: numbers of copies of the model to choose from.
        allow_split_ties: whether layers that share a parameter may be parted where they cannot stay together.
        constraints: of the user.
        estimated: costs of numbers of micro-batches that were not profiled, to be used as if they had been.
    """

    profile: Profile
    cluster: Cluster
    schedule: str
    micro_batches: tuple[int, ...]
    recompute: RecomputeChoice
    stages: int | Literal["auto"] | None
    chunks: int | None
    constraints: Constraints
    replicas: tuple[int, ...] = (1,)
    allow_split_ties: bool = False
    estimated: tuple[Costs, ...] = ()

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names to choose from."""
        if self.schedule == SEARCH:
            return (*AUTO, *SPLIT)
        return AUTO if self.schedule == "auto" else (self.schedule,)

    def costs_at(self, micro_batches: int) -> Costs:
        """The costs for that number of micro-batches, measured or estimated."""
        for costs in self.estimated:
            if costs.micro_batches == micro_batches:
                return costs
        return self.profile.at(micro_batches)


def search(request: Request) -> Plan | None:
    """The fastest plan, with the others as its alternatives; None where none fits."""
    for group in _groups(request):
        tried = [(candidate, devices, candidate.best_plan(devices)) for candidate, devices in group]
        found = [(candidate, devices, made) for candidate, devices, made in tried if made]
        if found:
            best = _best([made for _, _, made in found])
            if request.schedule in ("auto", SEARCH):
                best = improve_by_simulation(best, found)
            if request.schedule == SEARCH:
                best = search_order([best, *(made for _, _, made in found)])
            else:
                best, tried = _split(best, tried)
            return best.model_copy(update={"alternatives": tuple(_alternatives(best, tried))})
    return None


def infeasible_candidates(request: Request) -> Iterator[Infeasible]:
    """Why each of the candidates has no plan."""
    for group in _groups(request):
        for candidate, devices in group:
            yield candidate.infeasible(devices)


def _candidates(request: Request, *, allow_split_ties: bool) -> Iterator[Candidate]:
    shared = [group_devices(request.cluster, copies) for copies in request.replicas]
    for count, groups in itertools.product(request.micro_batches, shared):
        measured = request.costs_at(count)
        profile = request.profile.model_copy(update={"costs": (measured,)})
        constraints = request.constraints
        costs = ChainCosts(profile, measured, constraints.colocate, constraints.no_border, allow_split_ties)
        for name in request.schedules:
            own = CHUNKS.get(name)
            chunks = 1 if own is None else request.chunks or own
            if request.chunks in (None, chunks):
                yield Candidate(profile, groups, costs, name, chunks, request.recompute, constraints)


def _groups(request: Request) -> Iterator[list[tuple[Candidate, int]]]:
    """Settings and numbers of devices for a copy of the model; a group is tried where none before it has a plan."""
    ties = any(info.shares_with for info in request.profile.layers)
    may_part = request.allow_split_ties and request.schedule not in ASYNCHRONOUS
    ways = [False, True] if ties and may_part else [False]
    candidates = {parted: list(_candidates(request, allow_split_ties=parted)) for parted in ways}
    layers = len(request.profile.layers)
    most = [min(len(candidate.cluster), layers) for candidate in candidates[False]]
    if request.stages is None:
        for fewer, parted in itertools.product(range(max(most, default=0)), ways):
            pairs = zip(candidates[parted], most, strict=True)
            yield [(candidate, count - fewer) for candidate, count in pairs if count > fewer]
        return
    for parted in ways:
        yield [
            (candidate, devices)
            for candidate, count in zip(candidates[parted], most, strict=True)
            for devices in range(1, count + 1)
            if request.stages in ("auto", devices * candidate.chunks)
        ]


def _best(plans: Sequence[Plan]) -> Plan:
    """The fastest; of equal ones one with few copies, then with few stages, then with little memory, then the first."""
    fastest = min(made.predicted.step_seconds for made in plans)
    near = [made for made in plans if made.predicted.step_seconds <= fastest * (1 + _EQUAL)]
    return min(near, key=lambda made: (made.replicas, made.chunks, max(made.predicted.memory_bytes)))


def _split(best: Plan, tried: _Tried) -> tuple[Plan, _Tried]:
    """The plans with backwards split on the critical path, which may make another one the fastest."""
    made = {id(plan): with_split_critical(plan) for plan in (best, *(plan for *_, plan in tried if plan))}
    best = made[id(best)]
    tried = [(candidate, devices, made[id(plan)] if plan else None) for candidate, devices, plan in tried]
    limit = best.predicted.step_seconds * (1 - _EQUAL)
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
    if its.step_seconds <= mine.step_seconds * (1 + _EQUAL):
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
