"""The report section with the timelines: predicted and measured steps, one below another on a common axis."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from schedules import Kind, Timeline
from schedules.core.dependencies import CODE
from schedules.pictures.colours import LOOKS

from ...units import format_seconds
from ..plan_tables import stage_numbers
from ..quantity import TimeUnit, percent
from ..table import Column, FittingTable
from .data_table import TABLE_ASSETS, data_table
from .run import Run, timelines_of
from .section import Section, render
from .timeline_columns import kinds_of, timeline_columns

# What every chart on the axis of time needs.
CHART_ASSETS = ("charts.css", "axis.js", "tips.js", "time_chart.js")


def timelines_section(runs: Sequence[Run]) -> Section | None:
    """Return the section with the timelines of all runs; None if no run has a timeline."""
    shown = timelines_of(runs)
    if not shown:
        return None
    span = span_of(runs)
    kinds = _drawn_kinds(timeline for _, _, timeline in shown)
    columns: dict[str, np.ndarray] = {}
    data: list[dict[str, Any]] = []
    for number, (run, name, timeline) in enumerate(shown):
        found = timeline_columns(timeline, run.plan, span)
        columns |= {f"{number}.{column}": values for column, values in found.columns.items()}
        data.append(
            {
                "name": name,
                "devices": run.row_names,
                "offsets": found.offsets,
                "sizes": found.sizes,
                "makespan": timeline.makespan,
                "device_of": timeline.schedule.device_of,
                "per_replica": timeline.schedule.model_stages,
            }
        )
    return Section(
        key="timelines",
        title="Timelines",
        html=render(
            "timelines.html",
            timelines=[
                {
                    "name": name,
                    "figures": f"{format_seconds(timeline.makespan)}, {percent(timeline.bubble)} idle",
                    "table": data_table(_seconds_table(timeline, name, run.row_names)),
                }
                for run, name, timeline in shown
            ],
            legend=[LOOKS[kind] for kind in LOOKS if kind in kinds],
            chunks=any(timeline.schedule.stages > timeline.schedule.devices for _, _, timeline in shown),
        ),
        data={"span": span, "timelines": data, "kinds": [_kind_data(kind) for kind in kinds]},
        columns=columns,
        assets=(
            *CHART_ASSETS,
            "actions.js",
            "timeline_picture.js",
            "timelines.js",
            *TABLE_ASSETS,
        ),
    )


def span_of(runs: Sequence[Run]) -> float:
    """Return the seconds of the longest step, which is the length of the time axis."""
    return max(timeline.makespan for _, _, timeline in timelines_of(runs))


def _drawn_kinds(timelines: Iterable[Timeline]) -> list[Kind]:
    """Return the kinds of all timelines, as :class:`Kind` lists them."""
    found = {kind for timeline in timelines for kind in kinds_of(timeline.schedule)}
    return [kind for kind in Kind if kind in found]


def _kind_data(kind: Kind) -> dict[str, Any]:
    """Return how to name and draw a kind."""
    look = LOOKS[kind]
    return {
        "code": CODE[kind],
        "letter": kind.value,
        "word": look.word,
        "light": look.light,
        "dark": look.dark,
    }


def _seconds_table(timeline: Timeline, name: str, devices: Sequence[str]) -> FittingTable:
    """Make a table with the actions and their seconds of each device, by kind."""
    schedule, kinds = timeline.schedule, kinds_of(timeline.schedule)
    count: Counter[tuple[int, Kind]] = Counter()
    seconds: dict[tuple[int, Kind], float] = defaultdict(float)
    for device, row in enumerate(zip(schedule.actions, timeline.starts, timeline.ends, strict=True)):
        for action, start, end in zip(*row, strict=True):
            count[device, action.kind] += 1
            seconds[device, action.kind] += end - start
    unit = TimeUnit.for_all([timeline.makespan])
    rows = range(schedule.devices)
    columns = [
        Column("device", list(devices), text=True),
        Column("stages", [stage_numbers(schedule.stages_of(row)) for row in rows]),
    ]
    for kind in kinds:
        word = _kind_data(kind)["word"]
        columns += [
            Column(f"{word},\nactions", [str(count[row, kind]) for row in rows]),
            Column(f"{word}\n{unit.name}", [unit.text(seconds[row, kind]) for row in rows]),
        ]
    idle = [unit.text(max(0.0, timeline.makespan - busy)) for busy in timeline.busy]
    columns.append(Column(f"idle\n{unit.name}", idle))
    return FittingTable(f"Seconds of each device, {name}", columns)
