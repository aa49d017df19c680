"""Changes the order of a plan's actions: splits backwards on the critical path, or searches for another order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import schedules
from schedules import Kind

from ..costs.layer_ranges import ChainCosts
from ..plan_document import Plan
from ..searched_order import SEARCH, order_text

_PLACEMENTS = 3  # placements of the stages that an order is searched for
_NEAR = 1.3  # relative to the best step: slower plans are not searched
_EFFORT = 1.0


def search_order(plans: Sequence[Plan]) -> Plan:
    """Return the fastest plan under schedule "search": the best plans with an order of actions found for their stages.

    No slower than any of the plans. Replicas all use the order that is found for the first one. If stages recompute,
    the search does not know their memory: an order that does not fit is dropped, and the plan keeps its own.

    Args:
        plans: that fit; at least one.
    """
    ranked = sorted(plans, key=lambda plan: plan.predicted.step_seconds)
    best: dict[tuple[int, ...], Plan] = {}
    for plan in ranked:
        if plan.predicted.step_seconds <= _NEAR * ranked[0].predicted.step_seconds:
            best.setdefault(plan.build_schedule().device_of, plan)
    chosen = list(best.values())[:_PLACEMENTS]
    found = [
        made
        for plan in chosen
        for made in (_ordered(plan, _own_order(plan), same=True), _searched(plan, _EFFORT / len(chosen)))
        if made
    ]
    return min(found, key=lambda plan: plan.predicted.step_seconds)


def search_within(
    plan: Plan, micro_batches: int | None = None, effort: float = _EFFORT
) -> schedules.Schedule:
    """Search an order for the stages of one replica where they are, within the memory of their devices.

    Gradients of micro-batches are added in their order, as in training without stages.

    Args:
        plan: if stages recompute, the search does not know their memory and keeps to no limit.
        micro_batches: of all replicas; None for the plan's number.
        effort: as for :func:`schedules.search`.

    Raises:
        ScheduleError: no order within the memory is found.
    """
    one = plan.first_replica
    timeline, costs = one.simulate(), one.stage_costs()
    free = one.free_stash_bytes(timeline)
    recomputes = any(stage.mode != "never" for stage in plan.stages)
    # The search assumes that I leaves no more than the stash: then what fits it, fits.
    stash = list(map(max, costs.stash_bytes, costs.weight_stash_bytes))
    return schedules.search(
        replace(costs, stash_bytes=stash),
        len(free),
        -(-(micro_batches or plan.micro_batches) // plan.replicas),
        memory=() if recomputes else free,
        placement=timeline.schedule.device_of,
        effort=effort,
    )


def _own_order(plan: Plan) -> schedules.Schedule:
    """The order of the first replica under the plan's own schedule, with its split backwards."""
    one = plan.first_replica
    bare = schedules.build(one.schedule, len(one.workers), one.micro_batches, one.chunks)
    split = [schedules.Action.parse(text) for text in plan.split_critical]
    return schedules.split_backward(bare, split) if split else bare


def _searched(plan: Plan, effort: float) -> Plan | None:
    """The plan with the order that is found for it; None if that does not fit."""
    try:
        order = search_within(plan, effort=effort)
    except schedules.ScheduleError:
        return None  # a device has memory for one micro-batch, but not for its deferred weight gradients
    return _ordered(plan, order, same=False)


def _ordered(plan: Plan, order: schedules.Schedule, *, same: bool) -> Plan | None:
    """The plan with this order for every replica; None if it does not fit."""
    # A cut that does not fit under the plan's schedule may fit with another order: the bound then needs no limits.
    unlimited = all(device.memory_bytes is None for device in plan.workers)
    bound = plan.predicted.bottleneck_bound if same or unlimited else 0.0
    order_of_all = {"schedule": SEARCH, "actions": order_text(order), "split_critical": ()}
    made = plan.model_copy(update=order_of_all).predict(bottleneck_bound=bound)
    return made if _fits(made) else None


def with_split_critical(plan: Plan, costs: ChainCosts | None = None) -> Plan:
    """Return the plan with backwards split (I, then W) where that shortens its step within the devices' memory.

    The plan is returned as it is if split backwards were not measured, as in a profile made by hand, or if its schedule
    is asynchronous.

    Args:
        plan: under a named schedule, without split backwards.
        costs: of its layers; None to compute them.
    """
    if any(stage.split_seconds is None for stage in plan.stages):
        return plan
    one = plan.first_replica
    plain, timeline = one.build_schedule(), one.simulate()
    made = schedules.split_critical(plain, one.stage_costs(), one.free_stash_bytes(timeline))
    if made is plain:
        return plan
    full = {action for row in made.actions for action in row if action.kind is Kind.B}
    split = [
        str(action)
        for row in schedules.split_overlaps(plain).actions
        for action in row
        if action.kind is Kind.B and action not in full
    ]
    changed = plan.model_copy(update={"split_critical": tuple(split)})
    made = changed.predict(costs, plan.predicted.bottleneck_bound)
    # Messages of replicas, and of both directions, may meet at other times than in the search.
    shorter = made.predicted.step_seconds < plan.predicted.step_seconds
    return made if shorter and _fits(made) else plan


def _fits(plan: Plan) -> bool:
    needs = zip(plan.cluster.devices, plan.predicted.memory_bytes, strict=True)
    return all(need <= (device.memory_bytes or math.inf) for device, need in needs)
