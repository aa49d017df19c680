"""The joint choice: schedule, micro-batches, recompute, number of stages; each with its best cut, and simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...cluster import Cluster
from ...profiling import Costs, Profile
from ..constraints import Wishes
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import RecomputeChoice
from ..feasibility.infeasible import Misfit
from ..partition.local_search import quickest
from ..partition.replica_groups import share_out
from ..plan_document import Alternative, Plan
from .candidate import ASYNCHRONOUS, CHUNKS, Setting
from .order_text import SEARCH
from .search_order import quickest_order
from .split_critical import with_early_gradients

# What "auto" tries, the simplest first: it wins where others are not faster. Not "looped-bfs", which adds up gradients
# in another order than micro-batches do, so that the last bits of the numbers would hang on what was quicker to time.
AUTO = ("1f1b", "gpipe", "eager-1f1b", "interleaved-1f1b", "hanayo", "sequential")
# Those that put weight gradients off.
SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-zb")

_Tried = list[tuple[Setting, int, Plan | None]]

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
        part_shared: whether layers that share a parameter may be parted where they cannot stay together.
        wishes: of the user.
        estimated: costs of numbers of micro-batches that were not profiled, to be used as if they had been.
    """

    profile: Profile
    cluster: Cluster
    schedule: str
    micro_batches: tuple[int, ...]
    recompute: RecomputeChoice
    stages: int | Literal["auto"] | None
    chunks: int | None
    wishes: Wishes
    replicas: tuple[int, ...] = (1,)
    part_shared: bool = False
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


def choose(request: Request) -> Plan | None:
    """The fastest plan, with the others as its alternatives; None where none fits."""
    for group in _groups(request):
        tried = [(setting, devices, setting.best_plan(devices)) for setting, devices in group]
        found = [(setting, devices, made) for setting, devices, made in tried if made]
        if found:
            best = _best([made for _, _, made in found])
            if request.schedule in ("auto", SEARCH):
                best = quickest(best, found)
            if request.schedule == SEARCH:
                best = quickest_order([best, *(made for _, _, made in found)])
            else:
                best, tried = _early(best, tried)
            return best.model_copy(update={"alternatives": tuple(_alternatives(best, tried))})
    return None


def misfits(request: Request) -> Iterator[Misfit]:
    """Why each of the settings has no plan."""
    for group in _groups(request):
        for setting, devices in group:
            yield setting.misfit(devices)


def _settings(request: Request, *, part_shared: bool) -> Iterator[Setting]:
    shared = [share_out(request.cluster, copies) for copies in request.replicas]
    for count, slots in itertools.product(request.micro_batches, shared):
        measured = request.costs_at(count)
        profile = request.profile.model_copy(update={"costs": (measured,)})
        wishes = request.wishes
        costs = ChainCosts(profile, measured, wishes.together, wishes.no_border, part_shared)
        for name in request.schedules:
            own = CHUNKS.get(name)
            chunks = 1 if own is None else request.chunks or own
            if request.chunks in (None, chunks):
                yield Setting(profile, slots, costs, name, chunks, request.recompute, wishes)


def _groups(request: Request) -> Iterator[list[tuple[Setting, int]]]:
    """Settings and numbers of devices for a copy of the model; a group is tried where none before it has a plan."""
    ties = any(info.shares_with for info in request.profile.layers)
    may_part = request.part_shared and request.schedule not in ASYNCHRONOUS
    ways = [False, True] if ties and may_part else [False]
    settings = {parted: list(_settings(request, part_shared=parted)) for parted in ways}
    layers = len(request.profile.layers)
    most = [min(len(setting.cluster), layers) for setting in settings[False]]
    if request.stages is None:
        for fewer, parted in itertools.product(range(max(most, default=0)), ways):
            pairs = zip(settings[parted], most, strict=True)
            yield [(setting, count - fewer) for setting, count in pairs if count > fewer]
        return
    for parted in ways:
        yield [
            (setting, devices)
            for setting, count in zip(settings[parted], most, strict=True)
            for devices in range(1, count + 1)
            if request.stages in ("auto", devices * setting.chunks)
        ]


def _best(plans: Sequence[Plan]) -> Plan:
    """The fastest; of equal ones one with few copies, then with few stages, then with little memory, then the first."""
    fastest = min(made.predicted.step_seconds for made in plans)
    near = [made for made in plans if made.predicted.step_seconds <= fastest * (1 + _EQUAL)]
    return min(near, key=lambda made: (made.replicas, made.chunks, max(made.predicted.memory_bytes)))


def _early(best: Plan, tried: _Tried) -> tuple[Plan, _Tried]:
    """The plans with early gradients, which may make another one the fastest."""
    made = {id(plan): with_early_gradients(plan) for plan in (best, *(plan for *_, plan in tried if plan))}
    best = made[id(best)]
    tried = [(setting, devices, made[id(plan)] if plan else None) for setting, devices, plan in tried]
    limit = best.predicted.step_seconds * (1 - _EQUAL)
    quicker = [plan for *_, plan in tried if plan and plan.predicted.step_seconds < limit]
    return _best(quicker) if quicker else best, tried


def _alternatives(best: Plan, tried: _Tried) -> list[Alternative]:
    """The others: those that fit, the fastest first, then those that do not."""
    fitting, others = [], []
    for setting, devices, made in tried:
        if made is best:
            continue
        described = Alternative(
            schedule=setting.schedule,
            micro_batches=setting.costs.micro_batches,
            chunks=setting.chunks,
            replicas=setting.slots.copies,
            stages=devices * setting.chunks,
            why="does not fit the memory of the devices",
        )
        if made is None:
            reason = setting.why_not(devices)
            if not reason or setting.schedule != best.schedule:
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
