"""Variants of a plan with one small change, each simulated, to explain what would change its step."""

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

_MOST_ACTIONS = 150_000  # limit of the actions to simulate, over all variants: about half a second
_MOST_PLANS = 32  # limit of the variants to simulate


class Nearby(NamedTuple):
    """A variant of a plan with one change.

    Attributes:
        change: text that names the change, as the subject of a sentence: "moving `head` to stage 1".
        plan: the changed plan, with a prediction.
        estimated: True if the costs are scaled from another micro-batch size, not measured.
    """

    change: str
    plan: Plan
    estimated: bool = False


def nearby_plans(plan: Plan, bottleneck: Sequence[int]) -> list[Nearby]:
    """Return variants of a plan that fit the memory and keep the constraints of its request, shortest step first.

    Changes, in the order tried: move a layer across a border of the bottleneck stages; no recompute; twice the
    micro-batches; move a layer across another border. The number of simulated actions is limited, so large plans have
    fewer variants.

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
    """Return a 1F1B plan that uses more devices by splitting layers that share parameters; None if there is none.

    Returns None at once if all devices are used, no layers share parameters, or the request already allows splitting.
    """
    assert plan.profile is not None
    asked = plan.constraints
    tied = any(info.shares_with for info in plan.profile.layers)
    if len(plan.workers) == len(plan.cluster) or not tied or asked.allow_split_ties:
        return None
    changed = {"schedule": "1f1b", "chunks": None, "stages": "auto", "micro_batches": plan.micro_batches}
    try:
        split = make_plan(plan.profile, plan.cluster, **{**vars(asked), **changed, "allow_split_ties": True})
    except (InfeasiblePlanError, InputError):  # it does not fit, or other keywords exclude 1F1B
        return None
    return split if len(split.workers) > len(plan.workers) else None


def with_mode(plan: Plan, mode: Mode, numbers: Sequence[int]) -> Plan:
    """Return the plan with these stages in another mode; its prediction is not updated."""
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
    """Return the costs of the layers, with the borders that the plan's request allows."""
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
    """Yield variants in which the first or last layer of one of the stages moves to the adjacent stage."""
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
    """Yield the plan with twice the micro-batches, unless the planner compared that number or it exceeds a limit."""
    count, most = 2 * plan.micro_batches, plan.constraints.max_micro_batches
    compared = {alternative.micro_batches for alternative in plan.alternatives}
    if count > profile.batch or count > (most or count) or count in compared or plan.schedule == SEARCH:
        return
    update = {"micro_batches": count, "profile": estimate(profile, count), "split_critical": ()}
    changed = _changed(plan, plan.stages).model_copy(update=update)
    yield Nearby(f"{count} micro-batches instead of {plan.micro_batches}", changed, estimated=True)
