"""The stages of a plan, or stages described by numbers, under another schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import schedules
from schedules import Schedule, StageCosts

from ..cluster import Device
from ..document import fault_texts
from ..planning import Plan
from ..planning.costs.stage_memory import with_recompute
from ..planning.search.order_text import SEARCH, order_text, searched_order
from ..planning.search.search_order import first_replica, order_within
from .errors import UsageError
from .files import read_schedule


@dataclass(frozen=True)
class Order:
    """The requested schedule; None means the value of the plan, or of the schedule file.

    Attributes:
        name: of a schedule, or ``"search"``.
        file: with a schedule, instead of its name.
        devices, micro_batches, chunks: what it is built for.
    """

    name: str | None = None
    file: Path | None = None
    devices: int | None = None
    micro_batches: int | None = None
    chunks: int | None = None


@dataclass(frozen=True)
class Played:
    """A schedule with the costs of its stages on its devices.

    Attributes:
        schedule: the schedule to simulate.
        costs: of its stages.
        devices: names, one per row of the schedule.
        other_bytes: what each device holds beside the stash; empty if unknown.
        limits: each device's memory; None without a limit.
    """

    schedule: Schedule
    costs: StageCosts
    devices: tuple[str, ...] = ()
    other_bytes: tuple[int, ...] = ()
    limits: tuple[int | None, ...] = ()

    @property
    def for_stash(self) -> list[float]:
        """Bytes that each device has left for its stash."""
        return [
            math.inf if limit is None else limit - other
            for limit, other in zip(self.limits, self.other_bytes, strict=True)
        ]

    def timeline(self) -> schedules.Timeline:
        """Simulate the schedule."""
        return schedules.simulate(self.schedule, self.costs)

    def bound(self) -> float:
        """Return seconds that no synchronous schedule of this placement can beat; 0 if unknown."""
        schedule = self.schedule
        if schedule.versions or schedule.replicas > 1:
            return 0.0
        return schedules.bound(
            self.costs, schedule.devices, schedule.micro_batches, placement=schedule.device_of
        )


def play_numbers(order: Order, make_costs: Callable[[int], StageCosts]) -> Played:
    """Build the schedule for stages that numbers describe.

    Args:
        order: the schedule; with a name it says devices and micro-batches.
        make_costs: the costs of so many stages.

    Raises:
        UsageError: an option is missing, or the file cannot be read.
        ScheduleError: the schedule does not exist for these numbers.
    """
    if order.file is not None:
        schedule = read_schedule(order.file)
        return Played(schedule, make_costs(schedule.model_stages))
    if order.name is None or order.devices is None or order.micro_batches is None:
        raise UsageError(
            "what is to be played? Give a plan that was saved, or as in --schedule 1f1b --devices 4 --micro-batches 8"
        )
    if order.name == "search":
        costs = make_costs(order.devices * (order.chunks or 1))
        return Played(schedules.search(costs, order.devices, order.micro_batches), costs)
    schedule = schedules.build(order.name, order.devices, order.micro_batches, order.chunks)
    return Played(schedule, make_costs(schedule.model_stages))


def play_plan(plan: Plan, order: Order) -> Played:
    """Put the stages of a plan under another schedule, with micro-batches of the plan's size.

    A stage that the schedule has on another device moves there; its times scale with the speeds of the two devices.

    Raises:
        UsageError: the stages do not divide over the devices, the cluster has too few devices, or the
            file cannot be read.
        ScheduleError: a single micro-batch does not fit.
    """
    if order.file is not None:
        schedule = read_schedule(order.file)
        if schedule.model_stages != len(plan.stages):
            raise UsageError(
                f"{order.file} is for {schedule.model_stages} stages, the plan has {len(plan.stages)}"
            )
        return _played(plan, schedule, _workers(plan, schedule.devices))
    chunks = order.chunks or plan.chunks
    devices, left = divmod(len(plan.stages), chunks)
    if left:
        raise UsageError(f"--chunks {chunks} does not divide the {len(plan.stages)} stages of the plan")
    name, count = order.name or plan.schedule, order.micro_batches or plan.micro_batches
    workers = _workers(plan, devices)
    each = -(-count // plan.replicas)
    own = (name, count, chunks) == (plan.schedule, plan.micro_batches, plan.chunks)
    early = plan.split_critical if own else ()
    if order.name is None and plan.actions and count <= plan.micro_batches and chunks == plan.chunks:
        schedule = searched_order(plan.actions, each)
    elif name == SEARCH:
        schedule = _search(plan, workers, each, chunks)
    else:
        try:
            schedule = schedules.build(name, devices, each, chunks)
        except schedules.ScheduleError as error:
            raise UsageError(f"{error}{_other_chunks(plan, chunks)}") from None
    if plan.replicas > 1 or schedule.replicas > 1:
        actions = order_text(schedule) if name == SEARCH else ()
        return _with_replicas(
            plan,
            {
                "schedule": name,
                "actions": actions,
                "split_critical": early,
                "micro_batches": count,
                "chunks": chunks,
            },
        )
    return _played(plan, schedule, workers, early if own or name == SEARCH else None)


def _search(plan: Plan, workers: Sequence[Device], micro_batches: int, chunks: int) -> Schedule:
    """Search the best schedule for the plan's stages on their devices, within the memory of the devices."""
    like = first_replica(plan).build_schedule()
    if chunks != plan.chunks:
        like = schedules.build("looped-bfs", len(workers), micro_batches, chunks)
    first = _played(plan, like, workers)
    try:
        return order_within(plan, first.costs, first.for_stash, like.device_of, micro_batches)
    except schedules.ScheduleError as error:
        raise UsageError(f"{error}: the plan's own order may still fit") from None


def _other_chunks(plan: Plan, chunks: int) -> str:
    """Return a hint at a number of chunks that may suit the schedule."""
    stages, count = len(plan.stages), 1 if chunks > 1 else 2
    if stages % count or stages // count > len(plan.cluster):
        return ": plan for that schedule"
    return f": --chunks {count} has the {stages} stages of the plan on {stages // count} devices"


def _workers(plan: Plan, devices: int) -> list[Device]:
    """Return the plan's devices in its order, then the other devices of the cluster."""
    own = list(plan.workers)
    own += [device for device in plan.cluster.devices if device not in own]
    if len(own) < devices:
        raise UsageError(f"the schedule needs {devices} devices, and the plan's cluster has {len(own)}")
    return own[:devices]


def _played(
    plan: Plan, schedule: Schedule, workers: Sequence[Device], early: Sequence[str] | None = ()
) -> Played:
    """Put the plan's stages under a schedule with these split backwards; None to choose those that shorten the step."""
    own = [
        [plan.stages[stage % len(plan.stages)] for stage in schedule.stages_of(row)]
        for row in range(schedule.devices)
    ]
    played = Played(
        schedule=with_recompute(schedule, [stage.recompute for stage in plan.stages]),
        costs=_costs(plan, schedule, workers),
        devices=tuple(device.name for device in workers),
        other_bytes=tuple(
            sum(stage.static_bytes for stage in stages) + max(stage.transient_bytes for stage in stages)
            for stages in own
        ),
        limits=tuple(device.memory_bytes for device in workers),
    )
    if early:
        chosen = map(schedules.Action.parse, early)
        return replace(played, schedule=schedules.split_backward(played.schedule, chosen))
    if early is None and all(stage.split_seconds is not None for stage in plan.stages):
        made = schedules.split_critical(played.schedule, played.costs, played.for_stash)
        return replace(played, schedule=made)
    return played


def _with_replicas(plan: Plan, order: Mapping[str, Any]) -> Played:
    """Put a plan with replicas under another order; each stage stays on its device.

    Raises:
        UsageError: the schedule has stages on one device that the plan has on two.
    """
    try:
        other = Plan(stages=plan.stages, cluster=plan.cluster, replica_devices=plan.replica_devices, **order)
    except ValidationError as error:
        raise UsageError("; ".join(fault_texts(error))) from None
    schedule, costs = other.build_schedule(), other.stage_costs()
    timeline = schedules.simulate(schedule, costs)
    needs = other.device_bytes(timeline)
    return Played(
        schedule,
        costs,
        devices=tuple(needs),
        other_bytes=tuple(
            need - int(peak) for need, peak in zip(needs.values(), timeline.peak_bytes, strict=True)
        ),
        limits=tuple(device.memory_bytes for device in other.workers),
    )


def _costs(plan: Plan, schedule: Schedule, workers: Sequence[Device]) -> StageCosts:
    """Return the costs of the plan's stages on the devices of this schedule."""
    homes = [workers[row] for row in schedule.device_of[: len(plan.stages)]]
    factors = [own.speed / home.speed for own, home in zip(plan.devices, homes, strict=True)]
    links = [[plan.cluster.link_between(one.name, other.name) for other in workers] for one in workers]

    def seconds(part: str) -> list[float]:
        return [getattr(stage, part) * factor for stage, factor in zip(plan.stages, factors, strict=True)]

    inputs, weights = zip(*(stage.part_seconds for stage in plan.stages), strict=True)
    return StageCosts(
        forward=seconds("forward_seconds"),
        backward_input=[seconds * factor for seconds, factor in zip(inputs, factors, strict=True)],
        backward_weight=[seconds * factor for seconds, factor in zip(weights, factors, strict=True)],
        backward=seconds("backward_seconds"),
        recompute=seconds("recompute_seconds"),
        latency=[[link.latency for link in row] for row in links],
        bandwidth=[[link.bandwidth or math.inf for link in row] for row in links],
        message_bytes=[stage.output_bytes for stage in plan.stages],
        stash_bytes=[stage.stash_bytes for stage in plan.stages],
        weight_stash_bytes=[stage.deferred_bytes for stage in plan.stages],
        boundary_bytes=[stage.boundary_bytes for stage in plan.stages],
    )
