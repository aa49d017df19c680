"""The report section that compares two plans, or two runs of one plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from schedules import Timeline

from ...units import format_seconds
from ..difference import difference_reports
from ..quantity import percent
from ..table import Column, FittingTable
from .data_table import TABLE_ASSETS, data_table
from .run import Run
from .section import Section, render


def comparison_section(runs: Sequence[Run]) -> Section | None:
    """Return the differences between two runs; None for one run."""
    if len(runs) < 2:
        return None
    one, other = runs
    reports = difference_reports(one.plan, other.plan, (one.name, other.name))
    if one.measured and other.measured:
        reports.append(_measured(one.measured, other.measured, (one.name, other.name)))
    html = render(
        "comparison.html",
        sentences=[report.plain for report in reports if isinstance(report, Text)],
        tables=[data_table(report) for report in reports if isinstance(report, FittingTable)],
    )
    return Section("comparison", "Differences", html, assets=TABLE_ASSETS)


def _measured(one: Timeline, other: Timeline, names: tuple[str, str]) -> FittingTable:
    """Make a table of the measured steps of two runs."""
    longer = f"{other.makespan / one.makespan - 1:+.1%}" if one.makespan else ""
    idler = f"{100 * (other.bubble - one.bubble):+.1f} points"
    return FittingTable(
        "Measured steps",
        [
            Column("figure", ["step", "bubble"], text=True),
            Column(names[0], [format_seconds(one.makespan), percent(one.bubble)]),
            Column(names[1], [format_seconds(other.makespan), percent(other.bubble)]),
            Column("change", [longer, idler]),
        ],
    )
