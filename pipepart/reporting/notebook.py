"""Shows profiles, plans, cuts and traces in notebooks: tables and pictures without scripts or style sheets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedules.pictures.draw import panels_html

from ..planning import Plan
from ..profiling import Profile
from ..runtime.observe.trace import Trace
from ..units import counted, format_seconds
from .folding import span
from .html_table import html_table, text
from .layers import layer_table
from .plan_tables import memory_table, stage_table
from .quantity import TimeUnit, longer
from .simulated import idle_table
from .table import Column, FittingTable, bars, times

if TYPE_CHECKING:
    from ..graph_partition.partition import Cut

_MOST_ROWS = 16
# Larger steps take seconds to simulate, and their boxes are too small to see.
_MOST_ACTIONS = 20_000


def notebook_html(value: Profile | Plan | Cut | Trace) -> str:
    """Return HTML of a value for a notebook cell, without scripts and with all names escaped."""
    if isinstance(value, Profile):
        return _profile(value)
    if isinstance(value, Plan):
        return _plan(value)
    return _trace(value) if isinstance(value, Trace) else _cut(value)


def _profile(profile: Profile) -> str:
    """Return the layers of a profile with their times and sizes; of more than 16, the first and the last."""
    return _cell(str(profile), html_table(layer_table(profile), most_rows=_MOST_ROWS, most_rank=3))


def _plan(plan: Plan) -> str:
    """Return the stages with their layers and times, the memory of each device, and the predicted timeline."""
    head = str(plan).partition("\n")[0]
    actions = 2 * len(plan.stages) * plan.micro_batches
    if plan.prediction is None:
        picture = ""
    elif actions > _MOST_ACTIONS:
        picture = (
            f"<p>The predicted timeline has {actions:,} actions: to_html() makes a page that shows it.</p>"
        )
    else:
        names = [device.name for device in plan.workers]
        picture = panels_html(plan.simulate().panels(names))
    tables = [
        html_table(table, most_rows=_MOST_ROWS, most_rank=1)
        for table in (stage_table(plan), memory_table(plan))
    ]
    return _cell(head, *tables, picture)


def _cut(cut: Cut) -> str:
    """Return one row a stage: its device, its first and last node, and its load."""
    longest = cut.bottleneck or 1.0
    table = FittingTable(
        "Stages",
        [
            Column("stage", [str(number) for number in range(len(cut.stages))]),
            Column("device", [device.name for device in cut.devices], text=True),
            Column("nodes", [span(list(map(str, nodes))) for nodes in cut.stages], text=True),
            Column("count", [str(len(nodes)) for nodes in cut.stages]),
            times("load", cut.loads, TimeUnit.for_all(cut.loads)),
            bars([load / longest for load in cut.loads], rank=0),
        ],
    )
    proven = "no cut has a smaller one" if cut.optimal else f"at most {cut.gap:.1%} above the smallest"
    head = (
        f"Cut into {counted(len(cut.stages), 'stage')}: bottleneck {format_seconds(cut.bottleneck)}, {proven}"
    )
    return _cell(head, html_table(table, most_rows=_MOST_ROWS))


def _trace(trace: Trace) -> str:
    """Return the median step beside the predicted one, and the idle time of each device."""
    if not any(step.schedule.micro_batches == trace.plan.micro_batches for step in trace.steps):
        return _cell(f"{trace!r}: no whole step was traced yet")
    median, predicted = trace.median, trace.predicted
    head = f"Trace of {counted(len(trace.steps), 'step')} of {trace.plan.schedule}: "
    head += f"median {format_seconds(median.makespan)}"
    names = [device.name for device in trace.plan.workers]
    if predicted is not None and trace.ratio is not None:
        how = longer(1 / trace.ratio, "as predicted")
        head += f", {how}{'' if how == 'as predicted' else ' than predicted'}"
    return _cell(
        head, panels_html(trace.panels()), html_table(idle_table(median, names), most_rows=_MOST_ROWS)
    )


def _cell(head: str, *parts: str) -> str:
    body = "".join(parts)
    return f'<div style="overflow-x:auto"><p style="margin:2px 0"><b>{text(head)}</b></p>{body}</div>'
