"""Summary of a simulated schedule, and a table of why each device waits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from schedules import Timeline

from ...units import counted, format_seconds
from ..kit.labels import labelled_lines
from ..kit.quantity import TimeUnit, bar, percent, size
from ..kit.table import Column, FittingTable
from ..plan.stage_names import stage_numbers


def simulation_summary(timeline: Timeline, bound: float = 0.0, own: Timeline | None = None) -> Group:
    """Summarise a schedule: makespan, bubble and lower bound.

    Args:
        timeline: simulated.
        bound: seconds that no schedule of these stages on these devices can beat; 0 where that is not known.
        own: of the plan's own schedule, to compare with.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    replicas = f", {schedule.replicas} replicas" if schedule.replicas > 1 else ""
    lines = [
        (
            "schedule",
            f"{schedule.name}, {counted(schedule.micro_batches, 'micro-batch', 'es')}, "
            f"{counted(schedule.model_stages, 'stage')} on "
            f"{schedule.devices} devices{replicas}",
        ),
        ("makespan", f"{format_seconds(makespan)}{_against_own(timeline, own)}"),
        ("bubble", f"{percent(timeline.bubble)} of the devices' time is idle"),
    ]
    if schedule.versions:
        lines.append(
            ("asynchronous", "weights are updated within the step: other numbers than plain training")
        )
    if bound and makespan:
        above = makespan / bound - 1
        lines.append(
            (
                "bound",
                "no schedule of these stages on these devices is shorter"
                if above < 1e-9
                else f"no schedule of these stages on these devices takes less than {format_seconds(bound)}: "
                f"this one is at most {above:.1%} above the best",
            )
        )
    return labelled_lines("Simulation", lines)


def idle_table(
    timeline: Timeline,
    devices: Sequence[str] = (),
    *,
    counted: bool = False,
    other_bytes: Sequence[int] = (),
    limits: Sequence[int | None] = (),
) -> FittingTable:
    """Make a table with one row per device: busy time, waits, peak stash.

    Args:
        timeline: simulated or measured.
        devices: their names; numbers if left out.
        counted: the stash of each stage is 1: it counts the micro-batches in flight, whatever their size.
        other_bytes: what each device holds beside the stash.
        limits: what each device has, None without a limit; goes with ``other_bytes``.
    """
    schedule, idle = timeline.schedule, timeline.idle
    unit = TimeUnit.for_all([timeline.makespan])
    late = any(each.delay > 1e-12 for each in idle)
    names = devices or [str(device) for device in range(schedule.devices)]
    shares = [each.total / timeline.makespan if timeline.makespan else 0.0 for each in idle]

    def times(header: str, seconds: Sequence[float], rank: int = 0) -> Column:
        return Column(f"{header}\n{unit.name}", [unit.text(_positive(each)) for each in seconds], rank)

    columns = [
        Column("device", names, text=True),
        Column(
            "stages" if schedule.stages > schedule.devices else "stage",
            [stage_numbers(schedule.stages_of(row)) for row in range(schedule.devices)],
        ),
        times("busy", timeline.busy),
        times("waits for\na device", [each.producer for each in idle]),
        times("waits for\na message", [each.transfer for each in idle]),
        *([times("delay", [each.delay for each in idle])] if late else []),
        times("drained", [each.finished for each in idle]),
        Column("idle", list(map(percent, shares))),
        Column("", list(map(bar, shares)), rank=4, text=True, style="cyan"),
    ]
    if counted:
        columns.append(Column("in flight,\nat most", [str(round(peak)) for peak in timeline.peak_bytes]))
    elif any(timeline.peak_bytes):
        columns.append(Column("stash,\nat most", [size(round(peak)) for peak in timeline.peak_bytes], rank=1))
    notes = ["Drained: done, until the last device ends."]
    if late:
        notes.insert(0, "Delay: between an action's inputs being ready and its start.")
    if other_bytes:
        needs = [round(peak) + other for peak, other in zip(timeline.peak_bytes, other_bytes, strict=True)]
        columns.append(Column("memory", list(map(size, needs)), rank=2))
        if any(limits):
            columns.append(Column("limit", [size(limit) if limit else "none" for limit in limits], rank=3))
        notes += [
            f"Does not fit: {name} needs {size(need)} and has {size(limit)}."
            for name, need, limit in zip(names, needs, limits, strict=True)
            if limit and need > limit
        ]
    return FittingTable(
        "Devices: busy and idle",
        columns,
        notes=notes,
    )


def _against_own(timeline: Timeline, own: Timeline | None) -> str:
    """Compare with the plan's own schedule, per micro-batch if the numbers of these differ."""
    if own is None or not own.makespan or own.schedule == timeline.schedule:
        return ""
    counts = timeline.schedule.micro_batches, own.schedule.micro_batches
    ratio = (timeline.makespan / counts[0]) / (own.makespan / counts[1]) - 1
    how = f"{abs(ratio):.1%} {'longer' if ratio > 0 else 'shorter'}" if abs(ratio) >= 0.0005 else "as long"
    what = "" if counts[0] == counts[1] else " a micro-batch"
    than = "as" if how == "as long" else "than"
    return (
        f", {how}{what} {than} the plan's own {own.schedule.name} with {counted(counts[1], 'micro-batch', 'es')} "
        f"({format_seconds(own.makespan)})"
    )


def _positive(seconds: float) -> float:
    """Differences of sums can be slightly negative."""
    return seconds if seconds > 1e-12 else 0.0
