"""A table of simulated schedules, one per row: step, bubble, and peak memory of each device."""

from __future__ import annotations

from collections.abc import Sequence

from schedules import Timeline

from .quantity import TimeUnit, longer, percent, size
from .table import Column, FittingTable

_MOST_DEVICES = 8  # that have a column of their own


def schedules_table(
    timelines: Sequence[Timeline],
    peaks: Sequence[Sequence[float]],
    *,
    memory: str,
    limits: Sequence[Sequence[int | None]] = (),
) -> FittingTable:
    """Make a table with one row per schedule.

    Args:
        timelines: simulated, one a schedule.
        peaks: of each schedule, the peak of each device: bytes, or micro-batches if ``memory`` is ``"in flight"``.
        memory: what is counted: ``"memory"``, ``"stash"`` or ``"in flight"``.
        limits: of each schedule, the memory of each device, None without a limit; left out if unknown.
    """
    counted = memory == "in flight"
    seconds = [timeline.makespan for timeline in timelines]
    unit, shortest = TimeUnit.for_all(seconds), min(seconds)
    columns = [
        Column("schedule", [timeline.schedule.name for timeline in timelines], text=True),
        Column("stages", [str(timeline.schedule.model_stages) for timeline in timelines], rank=2),
        Column(f"step\n{unit.name}", list(map(unit.text, seconds))),
        Column("against the\nshortest", [_against(each, shortest) for each in seconds], rank=1),
        Column("bubble", [percent(timeline.bubble) for timeline in timelines]),
    ]

    def amounts(header: str, values: Sequence[float | None], rank: int, name: str | None = None) -> Column:
        cells = ["" if each is None else f"{each:g}" if counted else size(round(each)) for each in values]
        return Column(header, cells, rank, name)

    devices = max(map(len, peaks))
    if any(map(any, peaks)):
        columns.append(amounts(f"{memory},\nat most", [max(each) for each in peaks], 0))
        if devices <= _MOST_DEVICES:
            columns += [
                amounts(f"device\n{row}", [each[row] if row < len(each) else None for each in peaks], 3)
                for row in range(devices)
            ]
    notes = [
        f"{timeline.schedule.name} does not fit: {size(round(need))} on a device that has {size(limit)}."
        for timeline, needs, row in zip(timelines, peaks, limits, strict=bool(limits))
        for need, limit in _worst(needs, row)
    ]
    if counted:
        notes.append(
            "In flight: micro-batches whose backward is not done, in units of all stages of a device."
        )
    return FittingTable("Schedules", columns, notes=notes)


def _against(seconds: float, shortest: float) -> str:
    return longer(seconds / shortest, "", 0) if shortest else ""


def _worst(needs: Sequence[float], limits: Sequence[int | None]) -> list[tuple[float, int]]:
    """Return need and limit of the device that lacks the most memory, if any lacks some."""
    lacking = [(need, limit) for need, limit in zip(needs, limits, strict=True) if limit and need > limit]
    return sorted(lacking, key=lambda pair: pair[1] - pair[0])[:1]
