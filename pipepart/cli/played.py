"""Played: a simulated step with device names, memory limits and the costs of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import schedules
from schedules import Schedule, StageCosts, Timeline
from schedules.analysis.write_trace import Traced, to_trace
from schedules.pictures.layout import Panel

from ..planning import Plan
from .described_stages import DescribedStages
from .results import SimulatedDevice, SimulatedStep
from .what_if import reordered, simulate_order

_MOST_ROWS = 64  # of a table; above it only the first replica is shown, alone


@dataclass(frozen=True)
class Played:
    """A simulated step.

    Attributes:
        timeline: of all devices.
        costs: of its stages.
        names: of the devices.
        drawn: the timeline of the devices that are shown: the first replica alone if there are many.
        rows: names of the devices that are shown.
        needs, limits: bytes of these devices; empty without a plan.
    """

    timeline: Timeline
    costs: StageCosts
    names: Sequence[str]
    drawn: Timeline
    rows: Sequence[str]
    needs: Sequence[int] = ()
    limits: Sequence[int | None] = ()

    @cached_property
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
        return Panel(self.timeline.schedule.name, self.drawn, self.rows)

    @property
    def traced(self) -> Traced:
        """The step as input for a Chrome trace."""
        return Traced(self.timeline, self.names, self.costs)

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
                    device=self.names[row],
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


def traced(played: Sequence[Played]) -> dict[str, Any]:
    """Return the timelines of simulated steps as one Chrome trace."""
    return to_trace({each.timeline.schedule.name: each.traced for each in played})


def play_plan(
    plan: Plan, order: Schedule | None, schedule: str | None, micro_batches: int | None, chunks: int | None
) -> Played:
    """Simulate the stages of a plan.

    Args:
        plan: with a profile.
        order: the order of its actions; None for that of the other arguments.
        schedule, micro_batches, chunks: None for those of the plan.

    Raises:
        UsageError: the stages do not fit the order.
    """
    if order is None:
        moved = reordered(plan, schedule, micro_batches, chunks)
        timeline = moved.simulate()
    else:
        moved, timeline = simulate_order(plan, order)
    names = [device.name for device in moved.workers]
    shown, rows, drawn = moved, names, timeline
    if order is None and len(names) > _MOST_ROWS and moved.replicas > 1:
        shown = moved.first_replica
        drawn, rows = shown.simulate(), [device.name for device in shown.workers]
    return Played(
        timeline,
        moved.stage_costs(),
        names,
        drawn,
        rows,
        needs=list(shown.device_bytes().values()),
        limits=[device.memory_bytes for device in shown.workers],
    )


def play_numbers(stages: DescribedStages, order: Schedule, latency: float, search: bool) -> Played:
    """Simulate described stages.

    Args:
        stages: their costs.
        order: of their actions.
        latency: seconds that a message between devices takes.
        search: look for a faster order of the same stages.
    """
    costs = stages.costs(order, latency)
    if search:
        order = schedules.search(costs, order.devices, order.micro_batches)
    timeline = schedules.simulate(order, costs)
    names = [f"device {row}" for row in range(order.devices)]
    return Played(timeline, costs, names, timeline, names)
