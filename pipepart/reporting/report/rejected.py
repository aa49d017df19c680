"""The section of the report with the plans that were not chosen, and the reason for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...planning import Plan
from ...planning.pasting import as_options
from ...units import counted, format_seconds
from ..plan_tables import alternatives_table
from ..quantity import longer
from ..table import FittingTable, bars
from .data_table import TABLE_ASSETS, data_table
from .run import Run
from .section import Section, render


def rejected_section(runs: Sequence[Run]) -> Section | None:
    """Return the section with the alternatives of each plan; None if there are none."""
    shown = [
        {
            "name": run.name,
            "summary": _summary(run.plan),
            "table": data_table(_with_bars(run.plan), row_header=1),
            "options": _options(run.plan),
        }
        for run in runs
        if run.plan.alternatives and run.plan.prediction
    ]
    if not shown:
        return None
    return Section("rejected", "Rejected plans", render("rejected.html", runs=shown), assets=TABLE_ASSETS)


def _summary(plan: Plan) -> str:
    """Say how many plans were considered, how far the best of them is behind, and how many have no figures."""
    others = plan.alternatives
    timed = [other for other in others if other.step_seconds is not None]
    words = f"The planner compared this plan with {counted(len(others), 'other plan')}."
    if timed:
        best = min(timed, key=lambda other: other.step_seconds or 0.0)
        step, chosen = best.step_seconds or 0.0, plan.predicted.step_seconds
        how = longer(step / chosen if chosen else 1.0, "as long", 1)
        than = f"{how} than" if how != "as long" else "as long as"
        words += (
            f" The best of them, {best.schedule} with {counted(best.micro_batches, 'micro-batch', 'es')} and "
            f"{counted(best.stages, 'stage')}, takes {format_seconds(step)}, {than} the chosen one."
        )
    if untimed := len(others) - len(timed):
        which = f"{untimed} of them" if timed else "any of them"
        words += (
            f" No step was computed for {which}: what does not fit, or cannot be faster, is not simulated."
        )
    if plan.out_of_time:
        words += " Its time was up before it had tried all that it wanted."
    return words


def _with_bars(plan: Plan) -> FittingTable:
    """Return the table of alternatives with bars for the step times."""
    table = alternatives_table(plan)
    steps = [plan.predicted.step_seconds, *(other.step_seconds for other in plan.alternatives)]
    longest = max(step for step in steps if step is not None) or 1.0
    column = bars([None if step is None else step / longest for step in steps], rank=0)
    at = next(index for index, each in enumerate(table.columns) if each.called.startswith("step")) + 1
    return replace(
        table, title="Plans considered", columns=[*table.columns[:at], column, *table.columns[at:]]
    )


def _options(plan: Plan) -> list[tuple[int, str]]:
    """Return the options of ``pipepart plan`` that give each alternative, with its number in the table."""
    return [
        (number, as_options(replace(plan.constraints, **other.keywords).given))
        for number, other in enumerate(plan.alternatives, 1)
        if other.step_seconds is not None
    ]
