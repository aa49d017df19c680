"""Searches an order of a plan's actions, or writes the order of its schedule as actions."""

from __future__ import annotations

import math
from dataclasses import replace

import schedules

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


def as_searched(plan: Plan) -> Plan:
    """Return the same plan under schedule "search", with the order of its named schedule written as actions."""
    replica = plan.first_replica
    order = schedules.build(replica.schedule, len(replica.workers), replica.micro_batches, replica.chunks)
    return plan.model_copy(update={"schedule": SEARCH, "chunks": 1, "actions": order_text(order)})


def _free_stash_bytes(plan: Plan, timeline: schedules.Timeline) -> list[float]:
    """Return [schedule rows]: bytes for stashes (limit less other memory) of each device; infinite for no limit."""
    needs = plan.device_bytes(timeline)
    return [
        math.inf if device.memory_bytes is None else device.memory_bytes - needs[device.name] + int(peak)
        for device, peak in zip(plan.workers, timeline.peak_bytes, strict=True)
    ]
