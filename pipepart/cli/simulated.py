"""The figures of a simulation as one value, for JSON."""

from __future__ import annotations

from schedules import Timeline

from ..document import Document, Value
from .what_if import Played


class DeviceFigures(Value):
    """One device: its stages, busy seconds, idle seconds by cause, and peak stash."""

    device: str
    stages: tuple[int, ...]
    busy_seconds: float
    producer_seconds: float
    transfer_seconds: float
    finished_seconds: float
    peak_stash_bytes: float


class Simulated(Document):
    """The result of a simulation.

    Attributes:
        schedule, micro_batches: the simulated schedule.
        makespan_seconds: of one step.
        bubble: idle fraction of the devices' time.
        zero_bubble: the same if each device starts its next step as soon as it has finished this one.
        bound_seconds: lower bound for any schedule of these stages on these devices; 0 if unknown.
        devices: one a row of the schedule.
        actions: of each device, in order.
    """

    schedule: str
    micro_batches: int
    makespan_seconds: float
    bubble: float
    zero_bubble: float
    bound_seconds: float
    devices: tuple[DeviceFigures, ...]
    actions: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, played: Played, timeline: Timeline) -> Simulated:
        """Collect the figures of a timeline."""
        schedule = timeline.schedule
        return cls(
            schedule=schedule.name,
            micro_batches=schedule.micro_batches,
            makespan_seconds=timeline.makespan,
            bubble=timeline.bubble,
            zero_bubble=timeline.zero_bubble,
            bound_seconds=played.bound(),
            devices=tuple(
                DeviceFigures(
                    device=played.devices[row] if played.devices else str(row),
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
