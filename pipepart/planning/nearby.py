"""Plans that differ from a plan in one small thing, with their exact predicted steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schedules import ScheduleError

from ..input_error import InputError
from ..profiling import Profile
from .constraints import read_constraints
from .costs.interpolate import estimate
from .costs.layer_ranges import ChainCosts
from .planner import plan as make_plan
from .plans.plan import Plan
from .plans.searched_order import SEARCH
from .plans.stage_plan import StagePlan
from .request import ASYNCHRONOUS, CHUNKS, DEFERRING
from .suggestions import InfeasiblePlanError

_MOST_ACTIONS = 150_000  # of all plans that are simulated: about half a second
_MOST_PLANS = 32


class Nearby(NamedTuple):
    """A plan with one change.

    Attributes:
        change: names it, as the subject of a sentence: "moving `head` to stage 1".
        plan: with the change, and its prediction.
        estimated: the costs are in proportion to those of another micro-batch size, not measured.
    """

    change: str
    plan: Plan
    estimated: bool = False


def nearby_plans(plan: Plan, bottleneck: Sequence[int]) -> list[Nearby]:
    """Return plans with one change that fit their devices and keep the constraints of the request, shortest step first.

    Tried in turn: one layer moved over a border, first over those of the bottleneck; no recompute; twice the
    micro-batches; zb-h1. What the planner has compared for ``schedule="auto"`` or ``micro_batches="auto"`` is left out.
    Large plans have fewer tries: the number of simulated actions is limited.

    Args:
        plan: with a profile.
        bottleneck: the stages of the busiest device.
    """
    assert plan.profile is not None
    costs = _allowed_costs(plan, plan.profile)
    left, found = _MOST_ACTIONS, []
    for one in (
        *_moved(plan, costs, bottleneck),
        *_without_recompute(plan),
        *_smaller_micro_batches(plan, plan.profile),
        *_with_split_backwards(plan),
        *_moved(plan, costs, [each for each in range(len(plan.stages)) if each not in bottleneck]),
    ):
        left -= 2 * len(plan.stages) * one.plan.micro_batches
        if left < 0 or len(found) == _MOST_PLANS:
            break
        try:
            predicted = one.plan.predict(None if one.estimated else costs)
        except ScheduleError:  # zb-h1 does not exist for these numbers
            continue
        found.append(one._replace(plan=predicted))
    return sorted((one for one in found if one.plan.fits), key=lambda one: one.plan.predicted.step_seconds)


def with_split_ties(plan: Plan) -> Plan | None:
    """Return the plan of more devices, under 1F1B, that splits layers that share parameters; None if there is none.

    It is asked for where devices are left unused and no two of these layers may be in different stages.
    """
    assert plan.profile is not None
    asked = plan.constraints
    tied = any(info.shares_with for info in plan.profile.layers)
    if len(plan.workers) == len(plan.cluster) or not tied or asked.allow_split_ties:
        return None
    changed = {"schedule": "1f1b", "chunks": None, "stages": "auto", "micro_batches": plan.micro_batches}
    try:
        made = make_plan(plan.profile, plan.cluster, **{**vars(asked), **changed, "allow_split_ties": True})
    except (InfeasiblePlanError, InputError):  # it does not fit, or the other wishes need another schedule
        return None
    return made if len(made.workers) > len(plan.workers) else None


def without_recompute(plan: Plan) -> Plan:
    """Return the plan with all stages keeping their stashes, without a prediction."""
    stages = tuple(stage.with_mode("never") if stage.recompute != "never" else stage for stage in plan.stages)
    return _changed(plan, stages)


def with_recompute(plan: Plan, numbers: Sequence[int]) -> Plan:
    """Return the plan with some stages recomputing every micro-batch, without a prediction."""
    stages = list(plan.stages)
    for number in numbers:
        stages[number] = stages[number].with_mode("always")
    return _changed(plan, stages)


def _changed(plan: Plan, stages: Sequence[StagePlan]) -> Plan:
    return plan.model_copy(update={"stages": tuple(stages), "alternatives": ()})


def _allowed_costs(plan: Plan, profile: Profile) -> ChainCosts:
    """The costs of the layers, with the borders that the plan's request allows."""
    asked = plan.constraints
    read = read_constraints(profile, asked.pin, asked.colocate, asked.no_cut_before, asked.cut_before)
    return ChainCosts(
        profile,
        profile.at(plan.micro_batches),
        colocate=read.colocate,
        no_border=read.no_border,
        allow_split_ties=asked.allow_split_ties,
        gathers_outputs=asked.reduction == "batch",
        may_relay=plan.cluster.links_differ,
    )


def _moved(plan: Plan, costs: ChainCosts, numbers: Sequence[int]) -> Iterator[Nearby]:
    """Plans with the first or last layer of one of these stages moved to the stage beside it."""
    stages, allowed = plan.stages, set(costs.allowed_borders.tolist())
    pinned = plan.constraints.pin or {}
    ends = list(itertools.accumulate(len(stage.layers) for stage in stages))
    for number in numbers:
        own = stages[number].layers
        for layer, rest, target, border in (
            (own[0], own[1:], number - 1, ends[number] - len(own) + 1),
            (own[-1], own[:-1], number + 1, ends[number] - 1),
        ):
            if not rest or not 0 <= target < len(stages) or border not in allowed or layer in pinned:
                continue
            other = stages[target]
            if other.device == stages[number].device:
                continue
            grown = (*other.layers, layer) if target < number else (layer, *other.layers)
            moved = list(stages)
            moved[number], moved[target] = _with_layers(stages[number], rest), _with_layers(other, grown)
            yield Nearby(f"moving `{layer}` to stage {target}", _changed(plan, moved))


def _with_layers(stage: StagePlan, layers: tuple[str, ...]) -> StagePlan:
    return stage.model_copy(update={"layers": layers})


def _without_recompute(plan: Plan) -> Iterator[Nearby]:
    if any(stage.recompute != "never" for stage in plan.stages):
        yield Nearby("keeping all stashes (recompute=never)", without_recompute(plan))


def _smaller_micro_batches(plan: Plan, profile: Profile) -> Iterator[Nearby]:
    """Twice the micro-batches, unless the planner has compared that number or the request limits it."""
    count, most = 2 * plan.micro_batches, plan.constraints.max_micro_batches
    compared = {other.micro_batches for other in plan.alternatives}
    if count > profile.batch or count > (most or count) or count in compared or plan.schedule == SEARCH:
        return
    changed = plan.model_copy(
        update={
            "micro_batches": count,
            "profile": estimate(profile, count),
            "split_critical": (),
            "alternatives": (),
        }
    )
    yield Nearby(f"{count} micro-batches instead of {plan.micro_batches}", changed, estimated=True)


def _with_split_backwards(plan: Plan) -> Iterator[Nearby]:
    """ZB-H1 for a schedule with one stage a device and whole backwards, unless the planner has compared it."""
    compared = plan.fingerprint and plan.constraints.schedule in ("auto", SEARCH)
    whole = CHUNKS.get(plan.schedule, 0) is None and plan.schedule not in (*DEFERRING, *ASYNCHRONOUS)
    if compared or not whole or plan.chunks > 1 or plan.constraints.reduction == "batch":
        return
    update = {"schedule": "zb-h1", "split_critical": (), "alternatives": ()}
    yield Nearby("schedule zb-h1", plan.model_copy(update=update))
