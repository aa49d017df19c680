"""Searches for an order of the actions of a plan's stages that is quicker than every schedule with a name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import schedules

from ..plan_document import Plan
from .order_text import SEARCH, order_text

_PLACEMENTS = 3  # for how many ways to lay the stages over the devices an order is searched
_NEAR = 1.3  # of the best, that a plan has to come to be searched for
_EFFORT = 1.0


def search_order(plans: Sequence[Plan]) -> Plan:
    """The quickest plan under schedule "search": the best plans with an order of actions found for their stages.

    Where the memory of a device makes stages run forwards again, what the search may hold is not known to it: an order
    that holds too much is dropped, and the plan keeps the order that it had.

    Args:
        plans: that fit, one at least.
    """
    ranked = sorted(plans, key=lambda plan: plan.predicted.step_seconds)
    best: dict[tuple[int, ...], Plan] = {}
    for plan in ranked:
        if plan.predicted.step_seconds <= _NEAR * ranked[0].predicted.step_seconds:
            best.setdefault(plan.build_schedule().device_of, plan)
    chosen = list(best.values())[:_PLACEMENTS]
    found = [made for plan in chosen for made in (_as_searched(plan), _searched(plan, _EFFORT / len(chosen)))]
    return min((plan for plan in found if plan), key=lambda plan: plan.predicted.step_seconds)


def order_within(
    plan: Plan,
    costs: schedules.StageCosts,
    for_stash: Sequence[float],
    placement: Sequence[int],
    micro_batches: int,
    effort: float = _EFFORT,
) -> schedules.Schedule:
    """The order that is found for a plan's stages.

    Args:
        plan: says whether stages run forwards again: what such a stage holds is not known to the search, which then
            keeps to no limit.
        costs: of the stages.
        for_stash: bytes for what is kept for backwards, one number a device.
        placement: the device of each stage.
        micro_batches: for how many.
        effort: as for :func:`schedules.search`.

    Raises:
        ScheduleError: none is found that keeps to the limits.
    """
    again = any(stage.recompute != "never" for stage in plan.stages)
    # The search takes it that I leaves no more than the stash: what then fits, fits.
    stash = list(map(max, costs.stash_bytes, costs.weight_stash_bytes))
    return schedules.search(
        replace(costs, stash_bytes=stash),
        len(for_stash),
        micro_batches,
        memory=() if again else for_stash,
        placement=placement,
        effort=effort,
    )


def _as_searched(plan: Plan) -> Plan:
    """The plan, with its order as one that was found."""
    order = schedules.build(plan.schedule, len(plan.workers), plan.micro_batches, plan.chunks)
    return _ordered(plan, order, plan.predicted.bottleneck_bound)


def _searched(plan: Plan, effort: float) -> Plan | None:
    """The plan with the order that is found for it, None where that does not fit."""
    timeline = plan.simulate()
    needs = plan.device_bytes(timeline)
    limits = [math.inf if device.memory_bytes is None else device.memory_bytes for device in plan.workers]
    for_stash = [
        limit - needs[device.name] + int(peak)
        for limit, device, peak in zip(limits, plan.workers, timeline.peak_bytes, strict=True)
    ]
    try:
        order = order_within(
            plan, plan.stage_costs(), for_stash, timeline.schedule.device_of, plan.micro_batches, effort
        )
    except schedules.ScheduleError:
        return None  # a device has room for one micro-batch, but not for what its weights would wait for
    # Cuts that do not fit with the one order may fit with the other: the bound holds where all fit.
    made = _ordered(plan, order, plan.predicted.bottleneck_bound if min(limits) == math.inf else 0.0)
    fits = all(
        made.device_bytes()[device.name] <= limit for device, limit in zip(plan.workers, limits, strict=True)
    )
    return made if fits else None


def _ordered(plan: Plan, order: schedules.Schedule, bound: float) -> Plan:
    draft = plan.model_copy(update={"schedule": SEARCH, "actions": order_text(order), "prediction": None})
    made = draft.refreshed()
    return made.model_copy(
        update={"prediction": made.predicted.model_copy(update={"bottleneck_bound": bound})}
    )
