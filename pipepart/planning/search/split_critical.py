"""Splits the backwards on a plan's critical path, so that their input gradients leave earlier."""

from __future__ import annotations

import schedules
from schedules import Kind

from ..plan_document import Plan
from .order_text import SEARCH


def with_split_critical(plan: Plan) -> Plan:
    """Return the plan with backwards split (I, then W) where that shortens its step within the devices' memory.

    The plan is returned as it is if split backwards were not measured, as in a profile made by hand, if its schedule is
    asynchronous, or if its order was searched for (which splits backwards anyway).

    Args:
        plan: without split backwards.
    """
    if plan.schedule == SEARCH or any(stage.split_seconds is None for stage in plan.stages):
        return plan
    plain, timeline = plan.build_schedule(), plan.simulate()
    made = schedules.split_critical(plain, plan.stage_costs(), plan.free_stash_bytes(timeline))
    if made is plain:
        return plan
    full = {action for row in made.actions for action in row if action.kind is Kind.B}
    split = [
        str(action)
        for row in schedules.split_overlaps(plain).actions
        for action in row
        if action.kind is Kind.B and action not in full
    ]
    fresh = plan.model_copy(update={"split_critical": tuple(split), "prediction": None}).refreshed()
    bound = {"bottleneck_bound": plan.predicted.bottleneck_bound}
    return fresh.model_copy(update={"prediction": fresh.predicted.model_copy(update=bound)})
