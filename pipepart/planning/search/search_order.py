"""Changes the order of a plan's actions: splits backwards on the critical path, or searches for a new order."""

from __future__ import annotations

import math
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
    """Search an order of actions for one replica, with the plan's stages and placement, within the devices' memory.

    Gradients of micro-batches are added in their order, as in training without stages.

    Args:
        plan: has the stages. If they recompute or offload, the search does not know their memory and has no limit.
        micro_batches: of all replicas; None for the plan's number.
        effort: as for :func:`schedules.search`.

    Raises:
        ScheduleError: no order within the memory is found.
    """
    replica = plan.first_replica
    timeline, costs = replica.simulate(), replica.stage_costs()
    free = _free_stash_bytes(replica, timeline)
    saves_memory = any(stage.mode != "never" for stage in plan.stages)
    # The search assumes that I keeps no more than the stash. With the larger of both sizes its orders fit.
    stash = list(map(max, costs.stash_bytes, costs.weight_stash_bytes))
    return schedules.search(
        replace(costs, stash_bytes=stash),
        len(free),
        -(-(micro_batches or plan.micro_batches) // plan.replicas),
        memory=() if saves_memory else free,
        placement=timeline.schedule.device_of,
        effort=effort,
    )


def as_searched(plan: Plan, costs: ChainCosts | None = None) -> Plan:
    """Return the same plan under schedule "search", with the order of its named schedule written as actions.

    Args:
        plan: a plan under a named schedule. Its split backwards become actions, too.
        costs: the costs of its layers; None to compute them.
    """
    replica = plan.first_replica
    bare = schedules.build(replica.schedule, len(replica.workers), replica.micro_batches, replica.chunks)
    split = [schedules.Action.parse(text) for text in plan.split_critical]
    order = schedules.split_backward(bare, split) if split else bare
    changed = plan.model_copy(
        update={"schedule": SEARCH, "chunks": 1, "actions": order_text(order), "split_critical": ()}
    )
    return changed.predict(costs, plan.predicted.bottleneck_bound)


def with_split_critical(plan: Plan, costs: ChainCosts | None = None) -> Plan:
    """Split backwards (I, then W) where that shortens the step of the plan within the devices' memory.

    Returns the plan unchanged if split backwards were not measured (as in a profile written by hand), or if its
    schedule is asynchronous.

    Args:
        plan: a plan under a named schedule, without split backwards.
        costs: the costs of its layers; None to compute them.
    """
    if any(stage.split_seconds is None for stage in plan.stages):
        return plan
    replica = plan.first_replica
    plain, timeline = replica.build_schedule(), replica.simulate()
    split_schedule = schedules.split_critical(
        plain, replica.stage_costs(), _free_stash_bytes(replica, timeline)
    )
    if split_schedule is plain:
        return plan
    full = {action for row in split_schedule.actions for action in row if action.kind is Kind.B}
    split = [
        str(action)
        for row in schedules.split_overlaps(plain).actions
        for action in row
        if action.kind is Kind.B and action not in full
    ]
    changed = plan.model_copy(update={"split_critical": tuple(split)})
    changed = changed.predict(costs, plan.predicted.bottleneck_bound)
    # With all replicas, or both copies of a bidirectional schedule, messages may take longer than the split assumes.
    shorter = changed.predicted.step_seconds < plan.predicted.step_seconds
    return changed if shorter and changed.fits else plan


def _free_stash_bytes(plan: Plan, timeline: schedules.Timeline) -> list[float]:
    """Return [schedule rows]: bytes for stashes (limit less other memory) of each device; infinite for no limit."""
    needs = plan.device_bytes(timeline)
    return [
        math.inf if device.memory_bytes is None else device.memory_bytes - needs[device.name] + int(peak)
        for device, peak in zip(plan.workers, timeline.peak_bytes, strict=True)
    ]
