"""Refines a profile with the measured costs of a plan's stages, and plans again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import schedules
from schedules import Kind

from ...cluster import Cluster
from ...profiling import Costs, LayerCost, Profile, Timing
from ..costs.layer_ranges import ChainCosts
from ..plan_document import Plan
from ..plan_record import SEARCH
from ..planner import plan as make_plan
from .measured_steps import StageTimes, checked_traces, stage_times

Traces = schedules.Timeline | Sequence[schedules.Timeline]


def refine(profile: Profile, plan: Plan, trace: Traces) -> Profile:
    """Return the profile with the measured costs of a plan's stages.

    The forwards of a stage's layers are scaled by one factor, and so are the backwards, so that their sum is the
    measured median over micro-batches and steps. Costs at other micro-batch sizes are scaled by the same factors. The
    speeds of the devices are taken into account. Layers that were predicted to take no time keep taking none.

    Args:
        profile: of the plan's layers, with costs for its number of micro-batches.
        plan: that was run.
        trace: measured steps of it, one or several: ``Pipeline(..., trace=True).last_trace``.

    Raises:
        ValueError: no trace, one that is empty or of another schedule, or a profile of other layers or without costs
            for the plan's number of micro-batches.
    """
    _check_layers(profile, plan)
    measured = stage_times(plan, checked_traces(plan, trace))
    costs = ChainCosts(profile, profile.at(plan.micro_batches))
    factors: list[tuple[float, float]] = []
    split = _mostly_split(plan)
    for number, (stage, device, times) in enumerate(zip(plan.stages, plan.devices, measured, strict=True)):
        layers = slice(len(factors), len(factors) + len(stage.layers))
        factors += [_factors(costs, layers, device.speed, times, number in split)] * len(stage.layers)
    return profile.model_copy(update={"costs": tuple(_scaled(each, factors) for each in profile.costs)})


def replan(
    plan: Plan,
    trace: Traces,
    profile: Profile | None = None,
    *,
    cluster: Cluster | None = None,
    **options: Any,
) -> Plan:
    """Return the best plan by the measured steps of another plan.

    Args:
        plan: that was run.
        trace: measured steps of it, one or several: ``Pipeline(..., trace=True).last_trace``.
        profile: to refine; None for the one in the plan, which has costs for its number of micro-batches only.
        cluster: the devices; None for the plan's.
        options: keywords of :func:`plan` to change. The others are those of the plan: its schedule, chunks, replicas
            and number of micro-batches, and the recompute mode and constraints that it was made with.

    Raises:
        ValueError: as :func:`refine` and :func:`plan` do, or the plan holds no profile and none is given.
        InfeasiblePlanError: as :func:`plan` does.
    """
    profile = profile or plan.profile
    if profile is None:
        raise ValueError(
            "this plan holds no profile: give the one to refine, as in replan(plan, trace, profile=...)"
        )
    refined = refine(profile, plan, trace)
    same: dict[str, Any] = {
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "replicas": plan.replicas,
        **dict(plan.constraints),
    }
    if plan.chunks > 1 and options.get("schedule", plan.schedule) == plan.schedule != SEARCH:
        same["chunks"] = plan.chunks
    if len(plan.workers) < len(plan.cluster):
        same["stages"] = "auto"
    made = make_plan(refined, cluster or plan.cluster, **{**same, **options})
    # The plan's own profile has the layers of a branched model in one order, as a chain.
    return made if refined.edges else made.model_copy(update={"edges": plan.edges})


def _check_layers(profile: Profile, plan: Plan) -> None:
    known = [info.name for info in profile.layers]
    planned = [name for stage in plan.stages for name in stage.layers]
    if known != planned:
        only = [name for name in known if name not in planned] + [
            name for name in planned if name not in known
        ]
        where = f"{only[0]!r} is only in one of them" if only else "their order is another"
        raise ValueError(f"the layers of the profile are not those of the plan: {where}")
    if plan.fingerprint not in ("", profile.fingerprint):
        raise ValueError(
            "the profile is of another model than the plan: their layers differ though not in name"
        )


def _mostly_split(plan: Plan) -> set[int]:
    """Return the stages that split most of their backwards, so that their measured seconds include the splitting."""
    rows = plan.build_schedule().actions
    weights = Counter(action.stage for row in rows for action in row if action.kind is Kind.W)
    stages = len(plan.stages)
    return {stage for stage in range(stages) if 2 * plan.replicas * weights[stage] > plan.micro_batches}


def _factors(
    costs: ChainCosts, layers: slice, speed: float, times: StageTimes, split: bool
) -> tuple[float, float]:
    """Return measured / predicted seconds of the forward and the backward of each stage."""
    forward = float(costs.forward[layers].sum()) / speed
    backward = float((costs.backward_input[layers] + costs.backward_weight[layers]).sum()) / speed
    if split and costs.split is not None:
        backward += float(costs.split[layers].sum()) / speed
    return times.forward / forward if forward else 1.0, times.backward / backward if backward else 1.0


def _scaled(costs: Costs, factors: Sequence[tuple[float, float]]) -> Costs:
    layers = tuple(_scaled_cost(cost, *each) for cost, each in zip(costs.layers, factors, strict=True))
    return costs.model_copy(update={"layers": layers, "loss": _scaled_cost(costs.loss, *factors[-1])})


def _scaled_cost(cost: LayerCost, forward: float, backward: float) -> LayerCost:
    def times(timing: Timing, factor: float) -> Timing:
        return Timing(seconds=timing.seconds * factor, spread=timing.spread * factor)

    return cost.model_copy(
        update={
            "forward": times(cost.forward, forward),
            "backward_input": times(cost.backward_input, backward),
            "backward_weight": times(cost.backward_weight, backward),
            "split_seconds": None if cost.split_seconds is None else cost.split_seconds * backward,
        }
    )
