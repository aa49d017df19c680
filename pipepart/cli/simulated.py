"""Simulated: a schedule with its timeline, on stages described by numbers or on the stages of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import schedules
from schedules import Kind, Schedule, StageCosts, Timeline
from schedules.pictures.svg import Panel

from ..document import Document, Seconds, Value, fault_texts
from ..planning import Plan
from .errors import UsageError
from .files import read_schedule

_MOST_ACTIONS = 4_000_000  # forwards and backwards; these take a minute and a few GiB
_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B)


class SimulatedDevice(Value):
    """A device in a simulated step.

    Attributes:
        device: its name, or number.
        stages: that it runs.
        busy_seconds: in which it computes.
        producer_seconds, transfer_seconds: in which it waits for another device, and for a message or a copy.
        finished_seconds: after its last action.
        peak_stash_bytes: the most that it keeps for backwards; micro-batches in flight if no stash was described.
    """

    device: str
    stages: tuple[int, ...]
    busy_seconds: Seconds
    producer_seconds: float
    transfer_seconds: float
    finished_seconds: float
    peak_stash_bytes: float


class SimulatedStep(Value):
    """The figures of a simulated step.

    Attributes:
        schedule: its name.
        micro_batches: of all replicas.
        makespan_seconds: from the first action to the last.
        bubble: idle fraction of the devices.
        zero_bubble: the bubble if each device starts its next step as soon as it has finished this one.
        bound_seconds: that no schedule of these stages on these devices can beat; 0 if unknown.
        devices: one each.
        actions: of each device, as ``"3F5"``: stage 3, forward, micro-batch 5.
    """

    schedule: str
    micro_batches: int
    makespan_seconds: Seconds
    bubble: float
    zero_bubble: float
    bound_seconds: Seconds
    devices: tuple[SimulatedDevice, ...]
    actions: tuple[tuple[str, ...], ...]


class SimulatedSteps(Document):
    """Simulated steps, one for each schedule of the command line."""

    schedules: tuple[SimulatedStep, ...]


@dataclass(frozen=True)
class Simulated:
    """A simulated step.

    Attributes:
        timeline: of all devices.
        costs: of its stages.
        devices: their names.
        plan: the plan with this schedule; None for stages described by numbers.
    """

    timeline: Timeline
    costs: StageCosts
    devices: Sequence[str]
    plan: Plan | None = None

    @property
    def bound(self) -> float:
        """Lower bound in seconds for synchronous schedules with this placement; 0 if unknown."""
        schedule = self.timeline.schedule
        if schedule.versions or schedule.replicas > 1:
            return 0.0
        return schedules.bound(
            self.costs, schedule.devices, schedule.micro_batches, placement=schedule.device_of
        )

    @property
    def panel(self) -> Panel:
        """The step as a panel of a picture."""
        return Panel(self.timeline.schedule.name, self.timeline, self.devices)

    @property
    def peaks(self) -> Sequence[float]:
        """The most memory of each device with a plan, else the largest stash."""
        return list(self.plan.device_bytes().values()) if self.plan else self.timeline.peak_bytes

    @property
    def figures(self) -> SimulatedStep:
        """The figures of the step, with the idle seconds of each device by cause."""
        timeline, schedule = self.timeline, self.timeline.schedule
        return SimulatedStep(
            schedule=schedule.name,
            micro_batches=schedule.micro_batches,
            makespan_seconds=timeline.makespan,
            bubble=timeline.bubble,
            zero_bubble=timeline.zero_bubble,
            bound_seconds=self.bound,
            devices=tuple(
                SimulatedDevice(
                    device=self.devices[row],
                    stages=schedule.stages_of(row),
                    busy_seconds=timeline.busy[row],
                    producer_seconds=idle.producer,
                    transfer_seconds=idle.transfer,
                    finished_seconds=idle.finished,
                    peak_stash_bytes=timeline.peak_bytes[row],
                )
                for row, idle in enumerate(timeline.idle)
            ),
            actions=tuple(tuple(map(str, row)) for row in schedule.actions),
        )


def build(name: str, devices: int | None, micro_batches: int | None, chunks: int | None) -> Schedule:
    """Read a schedule from a file, or build the named one.

    Raises:
        UsageError: the file cannot be read, the other arguments do not go with it, or a named schedule lacks a number
            or has too many actions.
    """
    if name.endswith((".csv", ".json")):
        if devices or micro_batches or chunks:
            raise UsageError(
                f"{name} has its devices, micro-batches and chunks: leave out the options for them"
            )
        return read_schedule(Path(name))
    if not devices or not micro_batches:
        raise UsageError(
            "give a saved plan, or describe the stages: --schedule 1f1b --devices 4 --micro-batches 8"
        )
    if (count := 2 * devices * (chunks or 1) * micro_batches) > _MOST_ACTIONS:
        raise UsageError(
            f"{devices:,} devices and {micro_batches:,} micro-batches make at least {count:,} forwards and backwards: "
            f"at most {_MOST_ACTIONS:,} are simulated"
        )
    return schedules.build(name, devices, micro_batches, chunks)


def on_described_stages(order: Schedule, latency: float, **numbers: Sequence[float]) -> Simulated:
    """Simulate stages described by numbers.

    Args:
        order: of their actions.
        latency: seconds that a message between devices takes.
        numbers: keywords of ``StageCosts``. Each has one number per stage, or one for all stages of a device together:
            so it describes the same model under schedules with one and with several stages per device.
    """
    stages, devices = order.model_stages, order.devices
    each: dict[str, Any] = {}
    for keyword, values in numbers.items():
        if len(values) not in (1, stages):
            option = "--" + keyword.removesuffix("_bytes").replace("_", "-")
            raise UsageError(f"{option} has {len(values)} numbers for {stages} stages: give 1 or {stages}")
        each[keyword] = [values[0] * devices / stages] * stages if len(values) == 1 else list(values)
    costs = StageCosts(**each, latency=latency)
    return Simulated(schedules.simulate(order, costs), costs, [f"device {row}" for row in range(devices)])


def on_plan(plan: Plan, name: str | None, micro_batches: int | None) -> Simulated:
    """Simulate the stages of a plan where they are, with the costs of its profile.

    Args:
        plan: with a profile.
        name: of another schedule, or a file of one; None for the plan's own.
        micro_batches: another number, each of the same size; None for the plan's own.

    Raises:
        UsageError: the stages cannot run so: the schedule has other numbers of stages on the devices, for example.
    """
    count = micro_batches or plan.micro_batches
    changes: dict[str, Any] = {"micro_batches": count}
    if name and name.endswith((".csv", ".json")):
        order = build(name, None, micro_batches, None)
        rows = [[str(action) for action in row if action.kind in _COMPUTE] for row in order.actions]
        changes = {"micro_batches": order.micro_batches, "schedule": "search", "actions": rows}
    elif name:
        changes |= {"schedule": name, "actions": ()}
    if changes != {"micro_batches": plan.micro_batches}:
        assert plan.profile is not None
        costs = plan.profile.at(plan.micro_batches).model_copy(
            update={"micro_batches": changes["micro_batches"]}
        )
        changes |= {
            "profile": plan.profile.model_copy(update={"costs": (costs,)}),
            "alternatives": (),
        }
        try:
            plan = Plan(**{**dict(plan), **changes}).refreshed()
        except ValidationError as error:
            faults = "; ".join(text.removeprefix("file: ") for text in fault_texts(error))
            raise UsageError(f"{faults}: plan again with this schedule") from None
    return Simulated(plan.simulate(), plan.stage_costs(), [device.name for device in plan.workers], plan)
