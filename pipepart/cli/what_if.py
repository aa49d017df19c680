"""Simulates the stages of a plan under another schedule, or with more or fewer micro-batches of the same size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

import schedules
from schedules import Kind, Schedule, ScheduleError, Timeline

from ..document import fault_texts
from ..planning import Plan, StagePlan
from ..planning.costs.stage_memory import with_modes
from ..planning.plans.searched_order import SEARCH, order_text
from ..planning.search.search_order import search_within, with_split_critical
from ..units import counted
from .errors import UsageError


def reordered(plan: Plan, schedule: str | None, micro_batches: int | None, chunks: int | None) -> Plan:
    """Return the plan with another order of actions. Its figures are computed from the plan's profile.

    A stage that the schedule has on another device moves there, unless the plan has replicas.

    Args:
        plan: with a profile.
        schedule: its name, or ``"search"``; None for the plan's own.
        micro_batches: their number, each of the plan's size; None for the plan's own number.
        chunks: stages per device; None for as many as they have in the plan.

    Raises:
        UsageError: there is no such schedule for these stages, or no searched order fits.
    """
    count, own_chunks = micro_batches or plan.micro_batches, _chunks(plan)
    chunks = chunks or own_chunks
    same_chunks = chunks == own_chunks
    own = same_chunks and count == plan.micro_batches and schedule in (None, plan.schedule)
    if own and schedule != SEARCH:
        return plan
    if schedule is None and plan.actions and count <= plan.micro_batches and same_chunks:
        return _with(plan, plan.stages, schedule=SEARCH, actions=plan.actions, micro_batches=count)
    name = schedule or plan.schedule
    if name != SEARCH:
        return with_split_critical(_named(plan, name, count, chunks))
    found = _searched(plan if same_chunks else _named(plan, "looped-bfs", count, chunks), count)
    comparable = same_chunks and count == plan.micro_batches
    return min([found, plan] if comparable else [found], key=lambda made: made.predicted.step_seconds)


def simulate_order(plan: Plan, schedule: Schedule) -> tuple[Plan, Timeline]:
    """Simulate the stages of a plan in the order of a given schedule, with the recomputes of the plan.

    Returns:
        The plan with its stages on the devices of that order, and the timeline.

    Raises:
        UsageError: the order is for another number of stages, or the cluster has too few devices.
    """
    if schedule.model_stages != len(plan.stages):
        raise UsageError(
            f"{schedule.name} is for {schedule.model_stages} stages, the plan has {len(plan.stages)}"
        )
    plan = plan.first_replica
    compute = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B)
    actions = [[str(action) for action in row if action.kind in compute] for row in schedule.actions]
    stages = _placed(plan, schedule.device_of)
    moved = _with(plan, stages, schedule=SEARCH, actions=actions, micro_batches=schedule.micro_batches)
    recomputed = with_modes(schedule, tuple(stage.mode for stage in plan.stages))
    return moved, schedules.simulate(recomputed, moved.stage_costs())


def _chunks(plan: Plan) -> int:
    """The stages of a device, rounded up: after a search, devices may have different numbers."""
    return -(-len(plan.stages) // len({stage.device for stage in plan.stages}))


def _named(plan: Plan, name: str, count: int, chunks: int) -> Plan:
    devices, left = divmod(len(plan.stages), chunks)
    if left:
        raise UsageError(f"--chunks {chunks} does not divide the {len(plan.stages)} stages of the plan")
    try:
        built = schedules.build(name, devices, -(-count // plan.replicas), chunks)
    except ScheduleError as error:
        raise UsageError(f"{error}{_other_chunks(plan, chunks)}") from None
    stages = plan.stages if plan.replicas > 1 else _placed(plan, built.device_of)
    return _with(plan, stages, schedule=name, micro_batches=count, chunks=chunks)


def _searched(plan: Plan, count: int) -> Plan:
    """Search an order for the stages where they are, within the memory of the devices."""
    try:
        order = search_within(plan, count)
    except ScheduleError as error:
        raise UsageError(f"{error}: the plan's own order may still fit") from None
    return _with(plan, plan.stages, schedule=SEARCH, actions=order_text(order), micro_batches=count)


def _with(plan: Plan, stages: Sequence[StagePlan], *, micro_batches: int, **order: Any) -> Plan:
    """Make the plan of these stages in another order, and compute its figures."""
    assert plan.profile is not None
    costs = plan.profile.at(plan.micro_batches).model_copy(update={"micro_batches": micro_batches})
    try:
        made = Plan(
            stages=tuple(stages),
            cluster=plan.cluster,
            replica_devices=plan.replica_devices,
            constraints=plan.constraints,
            profile=plan.profile.model_copy(update={"costs": (costs,)}),
            micro_batches=micro_batches,
            **order,
        )
    except ValidationError as error:
        raise UsageError("; ".join(text.removeprefix("file: ") for text in fault_texts(error))) from None
    return made.refreshed()


def _placed(plan: Plan, device_of: Sequence[int]) -> list[StagePlan]:
    """Put the stages on the plan's devices in its order, then on the other devices of the cluster."""
    devices = [*plan.workers, *(one for one in plan.cluster.devices if one not in plan.workers)]
    if len(devices) <= max(device_of):
        raise UsageError(
            f"the schedule needs {max(device_of) + 1} devices, and the plan's cluster has {len(devices)}"
        )
    return [
        stage.model_copy(update={"device": devices[row].name})
        for stage, row in zip(plan.stages, device_of, strict=False)
    ]


def _other_chunks(plan: Plan, chunks: int) -> str:
    """Return a hint at a number of chunks that may suit the schedule."""
    stages, count = len(plan.stages), 1 if chunks > 1 else 2
    if stages % count or stages // count > len(plan.cluster):
        return f": the {stages} stages of the plan do not suit it, plan again with this schedule"
    return f": --chunks {count} puts the {stages} stages of the plan on {counted(stages // count, 'device')}"
