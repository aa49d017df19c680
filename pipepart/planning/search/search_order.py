"""Changes the order of a plan's actions: splits backwards on the critical path, or searches for another order."""

from __future__ import annotations

from dataclasses import replace

import schedules
from schedules import Kind

from ..costs.layer_ranges import ChainCosts
from ..plans.plan import Plan
from ..plans.searched_order import SEARCH, order_text

_EFFORT = 1.0


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


def as_searched(plan: Plan, costs: ChainCosts | None = None) -> Plan:
    """Return the plan with the order of its named schedule, its split backwards included, written as actions.

    Args:
        plan: under a named schedule.
        costs: of its layers; None to compute them.
    """
    one = plan.first_replica
    bare = schedules.build(one.schedule, len(one.workers), one.micro_batches, one.chunks)
    split = [schedules.Action.parse(text) for text in plan.split_critical]
    order = schedules.split_backward(bare, split) if split else bare
    changed = plan.model_copy(
        update={"schedule": SEARCH, "chunks": 1, "actions": order_text(order), "split_critical": ()}
    )
    return changed.predict(costs, plan.predicted.bottleneck_bound)


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
    return made if shorter and made.fits else plan
