"""The stages of a plan, or described by numbers, under a schedule of the user's choice."""

from __future__ import annotations

import json
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
from ..planning.search.search_order import order_within
from .errors import Mistake


@dataclass(frozen=True)
class Order:
    """Which schedule is asked for; None where the plan, or the schedule itself, is to say.

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
    """A schedule, and what its stages cost on the devices that it puts them on.

    Attributes:
        schedule: what is played.
        costs: of its stages.
        devices: their names, one a row of the schedule.
        other_bytes: what each holds beside the stash; empty where that is not known.
        limits: what each has; None without a limit.
    """

    schedule: Schedule
    costs: StageCosts
    devices: tuple[str, ...] = ()
    other_bytes: tuple[int, ...] = ()
    limits: tuple[int | None, ...] = ()

    @property
    def for_stash(self) -> list[float]:
        """The bytes that each device has left for what is kept for backwards."""
        return [
            math.inf if limit is None else limit - other
            for limit, other in zip(self.limits, self.other_bytes, strict=True)
        ]

    def timeline(self) -> schedules.Timeline:
        """Its simulation."""
        return schedules.simulate(self.schedule, self.costs)

    def bound(self) -> float:
        """Seconds that no synchronous schedule of the same placement can beat; 0 where that is not known."""
        schedule = self.schedule
        if schedule.versions or schedule.replicas > 1:
            return 0.0
        return schedules.bound(
            self.costs, schedule.devices, schedule.micro_batches, placement=schedule.device_of
        )


def play_numbers(order: Order, make_costs: Callable[[int], StageCosts]) -> Played:
    """A schedule for stages that numbers describe.

    Args:
        order: the schedule; with a name it says devices and micro-batches.
        make_costs: the costs of so many stages.

    Raises:
        Mistake: something is not said, or the file cannot be read.
        ScheduleError: there is no such schedule for these numbers.
    """
    if order.file is not None:
        schedule = read_schedule(order.file)
        return Played(schedule, make_costs(schedule.model_stages))
    if order.name is None or order.devices is None or order.micro_batches is None:
        raise Mistake(
            "what is to be played? Give a plan that was saved, or as in --schedule 1f1b --devices 4 --micro-batches 8"
        )
    if order.name == "search":
        costs = make_costs(order.devices * (order.chunks or 1))
        return Played(schedules.search(costs, order.devices, order.micro_batches), costs)
    schedule = schedules.build(order.name, order.devices, order.micro_batches, order.chunks)
    return Played(schedule, make_costs(schedule.model_stages))


def play_plan(plan: Plan, order: Order) -> Played:
    """The stages of a plan under another schedule, with micro-batches of the size that the plan has.

    Each stage stays on its device where the schedule has it there; else it moves, and takes as much longer or shorter
    as the speeds of the devices say.

    Raises:
        Mistake: the stages do not divide over the devices, the cluster has too few of them, or the file cannot be read.
        ScheduleError: a single micro-batch does not fit.
    """
    if order.file is not None:
        schedule = read_schedule(order.file)
        if schedule.model_stages != len(plan.stages):
            raise Mistake(
                f"{order.file} is for {schedule.model_stages} stages, the plan has {len(plan.stages)}"
            )
        return _played(plan, schedule, _workers(plan, schedule.devices))
    chunks = order.chunks or plan.chunks
    devices, left = divmod(len(plan.stages), chunks)
    if left:
        raise Mistake(f"--chunks {chunks} does not divide the {len(plan.stages)} stages of the plan")
    name, count = order.name or plan.schedule, order.micro_batches or plan.micro_batches
    workers = _workers(plan, devices)
    each = -(-count // plan.replicas)
    own = (name, count, chunks) == (plan.schedule, plan.micro_batches, plan.chunks)
    early = plan.early if own else ()
    if order.name is None and plan.actions and count <= plan.micro_batches and chunks == plan.chunks:
        schedule = searched_order(plan.actions, each)
    elif name == SEARCH:
        schedule = _search(plan, workers, each, chunks)
    else:
        try:
            schedule = schedules.build(name, devices, each, chunks)
        except schedules.ScheduleError as error:
            raise Mistake(f"{error}{_other_chunks(plan, chunks)}") from None
    if plan.replicas > 1 or schedule.replicas > 1:
        actions = order_text(schedule) if name == SEARCH else ()
        return _in_copies(
            plan,
            {"schedule": name, "actions": actions, "early": early, "micro_batches": count, "chunks": chunks},
        )
    return _played(plan, schedule, workers, early if own or name == SEARCH else None)


def read_schedule(path: Path) -> Schedule:
    """A schedule as JSON, or as CSV of actions, a line a device.

    Raises:
        Mistake: the file cannot be read, or holds no schedule that runs.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Mistake(f"cannot read the schedule {str(path)!r}: {reason}") from None
    try:
        found = Schedule.from_json(text) if path.suffix == ".json" else Schedule.from_csv(text, path.stem)
        schedules.check(found)
    except json.JSONDecodeError as error:
        raise Mistake(f"{path} is no JSON: {error}") from None
    except schedules.ScheduleError as error:
        raise Mistake(f"{path} holds no schedule that runs: {error}") from None
    return found


def _search(plan: Plan, workers: Sequence[Device], micro_batches: int, chunks: int) -> Schedule:
    """The best that is found for the plan's stages where they are, within the memory of the devices."""
    like = plan.build_schedule()
    if chunks != plan.chunks:
        like = schedules.build("looped-bfs", len(workers), micro_batches, chunks)
    first = _played(plan, like, workers)
    try:
        return order_within(plan, first.costs, first.for_stash, like.device_of, micro_batches)
    except schedules.ScheduleError as error:
        raise Mistake(f"{error}: the plan's own order may still fit") from None


def _other_chunks(plan: Plan, chunks: int) -> str:
    """Where the stages do not suit a schedule, the number of chunks that might."""
    stages, count = len(plan.stages), 1 if chunks > 1 else 2
    if stages % count or stages // count > len(plan.cluster):
        return ": plan for that schedule"
    return f": --chunks {count} has the {stages} stages of the plan on {stages // count} devices"


def _workers(plan: Plan, devices: int) -> list[Device]:
    """Those of the plan in its order, and then what else the cluster has."""
    own = list(plan.workers)
    own += [device for device in plan.cluster.devices if device not in own]
    if len(own) < devices:
        raise Mistake(f"the schedule needs {devices} devices, and the plan's cluster has {len(own)}")
    return own[:devices]


def _played(
    plan: Plan, schedule: Schedule, workers: Sequence[Device], early: Sequence[str] | None = ()
) -> Played:
    """The plan's stages under a schedule with these early gradients; with None those that shorten it."""
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


def _in_copies(plan: Plan, order: Mapping[str, Any]) -> Played:
    """The same with several copies of the model, each stage on the device where the plan has it.

    Raises:
        Mistake: the schedule has stages on one device that the plan has on two.
    """
    try:
        other = Plan(stages=plan.stages, cluster=plan.cluster, copies=plan.copies, **order)
    except ValidationError as error:
        raise Mistake("; ".join(fault_texts(error))) from None
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
    """What the plan's stages cost where this schedule has them."""
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
        weight_stash_bytes=[stage.waiting_bytes for stage in plan.stages],
        boundary_bytes=[stage.boundary_bytes for stage in plan.stages],
    )
