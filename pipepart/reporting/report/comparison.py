"""The section that compares two plans, or two runs of one plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..differences import difference_tables
from .data_table import TABLE_ASSETS, data_table
from .run import Run
from .section import Section, render


def comparison_section(runs: Sequence[Run]) -> Section | None:
    """Return the differences between two runs; None for one run."""
    if len(runs) < 2:
        return None
    one, other = runs
    tables = difference_tables(one.plan, other.plan, (one.name, other.name), (one.measured, other.measured))
    html = render("comparison.html", tables=list(map(data_table, tables)))
    return Section("comparison", "Differences", html, assets=TABLE_ASSETS)
