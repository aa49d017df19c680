"""The section with the timelines: predicted and measured steps, one under another on one axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from schedules import Kind, Timeline
from schedules.core.dependencies import CODE

from ...units import format_seconds
from ..steps import KIND_WORDS
from .run import Run
from .section import Section, render
from .timeline_columns import kinds_of, timeline_columns

# The variables of page.css that have the colours of the kinds.
KIND_COLOURS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input",
    Kind.W: "weight",
    Kind.OVERLAP_F_B: "overlap",
    Kind.RECOMPUTE: "recompute",
    Kind.OFFLOAD: "copy",
    Kind.RELOAD: "copy",
    Kind.REDUCE_GRAD: "reduce",
    Kind.OPT_STEP: "reduce",
}


def timelines_section(runs: Sequence[Run]) -> Section | None:
    """Return the timelines of all runs; None if no run has one, as a plan that was written by hand."""
    shown = [(run, name, timeline) for run in runs for name, timeline in run.timelines.items()]
    if not shown:
        return None
    span = max(timeline.makespan for _, _, timeline in shown)
    kinds = [kind for kind in Kind if any(kind in kinds_of(timeline.schedule) for _, _, timeline in shown)]
    columns: dict[str, np.ndarray] = {}
    data: list[dict[str, Any]] = []
    for number, (run, name, timeline) in enumerate(shown):
        found = timeline_columns(timeline, run.plan, span)
        columns |= {f"{number}.{column}": values for column, values in found.columns.items()}
        data.append(
            {
                "name": name,
                "devices": run.devices,
                "offsets": found.offsets,
                "sizes": found.sizes,
                "makespan": timeline.makespan,
                "device_of": timeline.schedule.device_of,
                "per_replica": timeline.schedule.model_stages,
            }
        )
    legend = {kind: KIND_COLOURS[kind] for kind in kinds}
    return Section(
        key="timelines",
        title="Timelines",
        html=render(
            "timelines.html",
            timelines=[
                {
                    "name": name,
                    "makespan": format_seconds(timeline.makespan),
                    "table": _table(timeline, run.devices),
                }
                for run, name, timeline in shown
            ],
            legend=[(KIND_WORDS[kind], colour) for kind, colour in legend.items()],
        ),
        data={
            "span": span,
            "timelines": data,
            "kinds": [
                {"code": CODE[kind], "letter": kind.value, "word": KIND_WORDS[kind], "colour": colour}
                for kind, colour in legend.items()
            ],
        },
        columns=columns,
        assets=("timelines.css", "axis.js", "actions.js", "timeline_picture.js", "timelines.js"),
    )


def _table(timeline: Timeline, devices: Sequence[str]) -> dict[str, Any]:
    """Return what a timeline shows as a table: for each device and kind how many actions, and their seconds."""
    kinds = kinds_of(timeline.schedule)
    rows = []
    for device, row in enumerate(
        zip(timeline.schedule.actions, timeline.starts, timeline.ends, strict=True)
    ):
        count: dict[Kind, int] = defaultdict(int)
        seconds: dict[Kind, float] = defaultdict(float)
        for action, start, end in zip(*row, strict=True):
            count[action.kind] += 1
            seconds[action.kind] += end - start
        rows.append(
            {
                "device": devices[device],
                "stages": ", ".join(map(str, timeline.schedule.stages_of(device))),
                "kinds": [(count[kind], seconds[kind]) for kind in kinds],
                "idle": timeline.makespan - timeline.busy[device],
            }
        )
    return {"kinds": [KIND_WORDS[kind] for kind in kinds], "rows": rows}
