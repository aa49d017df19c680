"""Plans that differ from a plan in one small change, simulated: what to change first where a plan is explained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..input_error import InputError
from ..profiling import Profile
from .constraints import read_constraints
from .costs.interpolate import estimate
from .costs.layer_ranges import ChainCosts
from .costs.stage_memory import Mode
from .planner import plan as make_plan
from .plans.plan import Plan
from .plans.searched_order import SEARCH
from .plans.stage_plan import StagePlan
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
    micro-batches. Large plans have fewer tries: the number of simulated actions is limited.

    Args:
        plan: with a profile.
        bottleneck: the stages of the busiest device.
    """
    assert plan.profile is not None
    costs = _allowed_costs(plan, plan.profile)
    changes = itertools.chain(
        _moved(plan, costs, bottleneck),
        _without_recompute(plan),
        _smaller_micro_batches(plan, plan.profile),
        _moved(plan, costs, [number for number in range(len(plan.stages)) if number not in bottleneck]),
    )
    left, fitting = _MOST_ACTIONS, []
    for change in itertools.islice(changes, _MOST_PLANS):
        left -= 2 * len(plan.stages) * change.plan.micro_batches
        if left < 0:
            break
        predicted = change.plan.predict(None if change.estimated else costs)
        if predicted.fits:
            fitting.append(change._replace(plan=predicted))
    return sorted(fitting, key=lambda change: change.plan.predicted.step_seconds)


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
        split = make_plan(plan.profile, plan.cluster, **{**vars(asked), **changed, "allow_split_ties": True})
    except (InfeasiblePlanError, InputError):  # it does not fit, or the other wishes need another schedule
        return None
    return split if len(split.workers) > len(plan.workers) else None


def with_mode(plan: Plan, mode: Mode, numbers: Sequence[int]) -> Plan:
    """Return the plan with these stages in another mode, without a prediction."""
    stages = list(plan.stages)
    for number in numbers:
        stages[number] = stages[number].with_mode(mode)
    return _changed(plan, stages)


def recomputing_stages(plan: Plan) -> list[int]:
    """Return the numbers of the stages that recompute."""
    return [number for number, stage in enumerate(plan.stages) if stage.recompute != "never"]


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
    """Yield plans with the first or last layer of one of these stages moved to the stage beside it."""
    stages, allowed = plan.stages, set(costs.allowed_borders.tolist())
    pinned = plan.constraints.pin or {}
    ends = list(itertools.accumulate(len(stage.layers) for stage in stages))
    for number in numbers:
        layers = stages[number].layers
        for layer, rest, target, border in (
            (layers[0], layers[1:], number - 1, ends[number] - len(layers) + 1),
            (layers[-1], layers[:-1], number + 1, ends[number] - 1),
        ):
            if not rest or not 0 <= target < len(stages) or border not in allowed or layer in pinned:
                continue
            receiver = stages[target]
            if receiver.device == stages[number].device:
                continue
            grown = (*receiver.layers, layer) if target < number else (layer, *receiver.layers)
            moved = list(stages)
            moved[number] = stages[number].model_copy(update={"layers": rest})
            moved[target] = receiver.model_copy(update={"layers": grown})
            yield Nearby(f"moving `{layer}` to stage {target}", _changed(plan, moved))


def _without_recompute(plan: Plan) -> Iterator[Nearby]:
    if numbers := recomputing_stages(plan):
        yield Nearby("keeping all stashes (recompute=never)", with_mode(plan, "never", numbers))


def _smaller_micro_batches(plan: Plan, profile: Profile) -> Iterator[Nearby]:
    """Yield twice the micro-batches, unless the planner has compared that number or the request limits it."""
    count, most = 2 * plan.micro_batches, plan.constraints.max_micro_batches
    compared = {other.micro_batches for other in plan.alternatives}
    if count > profile.batch or count > (most or count) or count in compared or plan.schedule == SEARCH:
        return
    update = {"micro_batches": count, "profile": estimate(profile, count), "split_critical": ()}
    changed = _changed(plan, plan.stages).model_copy(update=update)
    yield Nearby(f"{count} micro-batches instead of {plan.micro_batches}", changed, estimated=True)
