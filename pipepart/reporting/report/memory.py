"""The report section with the memory of each device over the predicted and measured steps, by category."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...planning.plans.memory_over_time import DeviceMemory, memory_over_time
from ..quantity import percent, size
from ..table import Column, FittingTable
from .data_table import TABLE_ASSETS, data_table
from .run import Run, timelines_of
from .section import Section, render
from .timeline_columns import ticks
from .timelines import CHART_ASSETS, span_of

# From the bottom up, with the variable of page.css that has the colour: shades of one for what is there all the time.
_CATEGORIES = {
    "parameters": "static-0",
    "gradients": "static-1",
    "optimizer": "static-2",
    "buffers": "static-3",
    "stashes": "series-1",
    "inputs": "series-3",
    "weight gradients": "series-4",
    "messages": "series-6",
    "workspace": "series-2",
}


def memory_section(runs: Sequence[Run]) -> Section | None:
    """Return the section with memory over time, from the plan's sizes; None if no plan has sizes of its stages."""
    shown = [
        (run, name, timeline, memory_over_time(run.plan, timeline))
        for run, name, timeline in timelines_of(runs)
        if run.plan.profile is not None
    ]
    if not shown:
        return None
    span = span_of(runs)
    columns: dict[str, np.ndarray] = {}
    data = []
    for number, (run, _, timeline, devices) in enumerate(shown):
        columns[f"{number}.at"] = ticks(np.concatenate([each.at for each in devices]), timeline, span)
        used = [name for name in _CATEGORIES if any(each.bytes[name].any() for each in devices)]
        for name in used:
            joined = np.concatenate([each.bytes[name] for each in devices])
            columns[f"{number}.{name}"] = joined.astype(np.float32)
        data.append(
            {
                "devices": run.row_names,
                "limits": [device.memory_bytes for device in run.plan.workers],
                "peaks": _measured_peaks(run) if timeline is run.measured else None,
                "offsets": np.cumsum([0, *(each.at.size for each in devices)]).tolist(),
                "categories": [{"name": name, "colour": _CATEGORIES[name]} for name in used],
                "makespan": timeline.makespan,
            }
        )
    legend = {each["name"]: each["colour"] for one in data for each in one["categories"]}
    return Section(
        key="memory",
        title="Memory",
        html=render(
            "memory.html",
            shown=[
                (name, data_table(_table(run, name, devices, timeline is run.measured)))
                for run, name, timeline, devices in shown
            ],
            legend=legend.items(),
            limited=any(limit is not None for each in data for limit in each["limits"]),
            measured=any(run.measured is not None for run in runs),
            peaks=any(each["peaks"] for each in data),
        ),
        data={"span": span, "runs": data},
        columns=columns,
        assets=(*CHART_ASSETS, "memory_picture.js", "memory.js", *TABLE_ASSETS),
    )


def _measured_peaks(run: Run) -> list[int | None] | None:
    """Return the most bytes that each device had, as the trace has counted them; None if it has not."""
    if run.trace is None or not run.trace.memory_bytes:
        return None
    return [run.trace.memory_bytes.get(device) for device in run.devices]


def _table(run: Run, name: str, devices: Sequence[DeviceMemory], measured: bool) -> FittingTable:
    """Make a table of the peak of each device and what it consists of."""
    peaks = [int(each.total.argmax()) for each in devices]
    totals = [float(each.total.max()) for each in devices]
    limits = [device.memory_bytes for device in run.plan.workers]
    columns = [
        Column("device", list(run.row_names), text=True),
        Column("limit", [size(limit) if limit else "none" for limit in limits]),
        Column("peak,\nplanned", list(map(size, map(round, totals)))),
    ]
    if any(limits):
        shares = [total / limit if limit else None for total, limit in zip(totals, limits, strict=True)]
        columns.append(Column("of the\nlimit", ["" if share is None else percent(share) for share in shares]))
    if measured and (found := _measured_peaks(run)):
        columns.append(Column("peak,\nmeasured", list(map(size, found))))
    for category in _CATEGORIES:
        values = [round(float(each.bytes[category][at])) for each, at in zip(devices, peaks, strict=True)]
        if any(values):
            columns.append(Column(category, list(map(size, values))))
    return FittingTable(f"Peak of each device and what it consists of, {name}", columns)
