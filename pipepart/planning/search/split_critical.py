"""Which of a plan's backwards pass their gradient on before they are done."""

from __future__ import annotations

import math

import schedules
from schedules import Kind

from ..plan_document import Plan
from .order_text import SEARCH


def with_split_critical(plan: Plan) -> Plan:
    """The plan with backwards in two parts where that shortens its step, within the memory of its devices.

    Where the parts of the backwards were not timed apart, as in a profile made by hand, the plan stays as it is; so
    does one of an asynchronous schedule, and one that was searched for, whose backwards are in two parts anyway.

    Args:
        plan: without any.
    """
    if plan.schedule == SEARCH or any(stage.split_seconds is None for stage in plan.stages):
        return plan
    plain = plan.build_schedule()
    timeline = plan.simulate()
    needs = plan.device_bytes(timeline)
    limits = [math.inf if device.memory_bytes is None else device.memory_bytes for device in plan.workers]
    for_stash = [
        limit - needs[device.name] + peak
        for limit, device, peak in zip(limits, plan.workers, timeline.peak_bytes, strict=True)
    ]
    made = schedules.split_critical(plain, plan.stage_costs(), for_stash)
    if made is plain:
        return plan
    whole = {action for row in made.actions for action in row if action.kind is Kind.B}
    early = [
        str(action)
        for row in schedules.split_overlaps(plain).actions
        for action in row
        if action.kind is Kind.B and action not in whole
    ]
    fresh = plan.model_copy(update={"split_critical": tuple(early), "prediction": None}).refreshed()
    bound = {"bottleneck_bound": plan.predicted.bottleneck_bound}
    return fresh.model_copy(update={"prediction": fresh.predicted.model_copy(update=bound)})
