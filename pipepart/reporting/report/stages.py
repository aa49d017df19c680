"""The report section with the table of stages: their layers, devices, times and memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan_tables import stage_table
from .data_table import TABLE_ASSETS, data_table
from .run import Run
from .section import Section, render


def stages_section(runs: Sequence[Run]) -> Section:
    """Return the section with the stages of each plan; equal plans share one table."""
    shown = runs[:1] if all(run.plan == runs[0].plan for run in runs) else runs
    tables = [(run.name if len(shown) > 1 else "", data_table(stage_table(run.plan))) for run in shown]
    return Section("stages", "Stages", render("stages.html", tables=tables), assets=TABLE_ASSETS)
