"""The figures of a simulation as one value, for JSON."""

from __future__ import annotations

from schedules import Timeline

from ..document import Document, Value
from .what_if import Played


class DeviceFigures(Value):
    """One device: its stages, the seconds it computes and waits, by cause, and the most stash that it holds."""

    device: str
    stages: tuple[int, ...]
    busy_seconds: float
    producer_seconds: float
    transfer_seconds: float
    finished_seconds: float
    peak_stash_bytes: float


class Simulated(Document):
    """A schedule that was played.

    Attributes:
        schedule, micro_batches: what was played.
        makespan_seconds: of one step.
        bubble: idle part of the devices' time.
        zero_bubble: the same if each device began its next step when it is done with this one.
        bound_seconds: what no schedule of these stages on these devices can beat; 0 where that is not known.
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
        """The figures of a timeline."""
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
