"""Reports on simulated steps: what each device waits for, and a table that compares schedules."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from schedules import Timeline

from ..units import counted, format_seconds
from .plan_tables import stage_numbers
from .quantity import TimeUnit, longer, percent, size
from .table import Column, FittingTable, bars, labelled_lines, percents, sizes, times

_IN_FLIGHT = "In flight: micro-batches whose backward is not done, in units of all stages of a device."
_ROUNDING_SECONDS = 1e-12  # differences of sums can be this far from zero


def simulation_summary(timeline: Timeline, bound: float = 0.0) -> Group:
    """Summarise a schedule: makespan, bubble and lower bound.

    Args:
        timeline: simulated.
        bound: seconds that no schedule of these stages on these devices can beat; 0 if unknown.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    lines = [
        (
            "schedule",
            f"{schedule.name}, {counted(schedule.micro_batches, 'micro-batch', 'es')}, "
            f"{counted(schedule.model_stages, 'stage')} on {counted(schedule.devices, 'device')}",
        ),
        ("makespan", format_seconds(makespan)),
        ("bubble", f"{percent(timeline.bubble)} of the devices' time is idle"),
    ]
    if schedule.versions:
        lines.append(("asynchronous", "weights change within the step: not the numbers of plain training"))
    if bound and makespan:
        text = "no schedule of these stages on these devices is shorter"
        if makespan / bound - 1 >= 1e-9:
            text = (
                f"no schedule of these stages on these devices takes less than {format_seconds(bound)}: "
                f"this one is at most {makespan / bound - 1:.1%} above the best"
            )
        lines.append(("bound", text))
    return labelled_lines("Simulation", lines)


def idle_table(timeline: Timeline, devices: Sequence[str] = (), *, in_flight: bool = False) -> FittingTable:
    """Make a table with one row per device: busy time, waits, peak stash.

    Args:
        timeline: simulated or measured.
        devices: their names; numbers if left out.
        in_flight: the stashes of a device's stages are 1 together: they count the micro-batches in flight.
    """
    schedule, idle = timeline.schedule, timeline.idle
    unit = TimeUnit.for_all([timeline.makespan])
    late = any(each.delay > _ROUNDING_SECONDS for each in idle)
    shares = [each.total / timeline.makespan if timeline.makespan else 0.0 for each in idle]

    def seconds(header: str, values: Sequence[float], rank: int = 0) -> Column:
        return times(header, [each if each > _ROUNDING_SECONDS else 0.0 for each in values], unit, rank)

    columns = [
        Column("device", list(devices) or list(map(str, range(schedule.devices))), text=True),
        Column("stages", [stage_numbers(schedule.stages_of(row)) for row in range(schedule.devices)]),
        seconds("busy", timeline.busy),
        seconds("waits for\na device", [each.producer for each in idle]),
        seconds("waits for\na message", [each.transfer for each in idle]),
        *([seconds("delay", [each.delay for each in idle])] if late else []),
        seconds("drained", [each.finished for each in idle], rank=1),
        percents("idle", shares),
        bars(shares, rank=4),
    ]
    if in_flight:
        columns.append(Column("in flight,\nat most", [f"{peak:g}" for peak in timeline.peak_bytes]))
    elif any(timeline.peak_bytes):
        columns.append(sizes("stash,\nat most", list(map(round, timeline.peak_bytes)), 1))
    notes = ["Delay: between an action's inputs being ready and its start."] if late else []
    notes.append("Drained: the device has finished, and the last one has not.")
    return FittingTable("Devices: busy and idle", columns, notes=notes)


def schedules_table(timelines: Sequence[Timeline], peaks: Sequence[float], memory: str) -> FittingTable:
    """Make a table with one row per schedule.

    Args:
        timelines: simulated, one a schedule.
        peaks: of each schedule, that of its fullest device: bytes, or micro-batches if ``memory`` is ``"in flight"``.
        memory: what is counted: ``"memory"``, ``"stash"`` or ``"in flight"``.
    """
    in_flight = memory == "in flight"
    seconds = [timeline.makespan for timeline in timelines]
    shortest = min(seconds)
    return FittingTable(
        "Schedules",
        [
            Column("schedule", [timeline.schedule.name for timeline in timelines], text=True),
            Column("stages", [str(timeline.schedule.model_stages) for timeline in timelines], rank=2),
            times("step", seconds, TimeUnit.for_all(seconds)),
            Column(
                "against the\nshortest",
                [longer(each / shortest, "", 0) if shortest else "" for each in seconds],
                rank=1,
            ),
            percents("bubble", [timeline.bubble for timeline in timelines]),
            Column(
                f"{memory},\nat most",
                [f"{peak:g}" if in_flight else size(round(peak)) for peak in peaks],
            ),
        ],
        notes=[_IN_FLIGHT] if in_flight else [],
    )
