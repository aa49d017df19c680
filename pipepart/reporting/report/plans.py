"""The sections of the report that are tables: stages, differences of two plans, and rejected plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.text import Text

from ...planning import Plan
from ...planning.pasting import as_options
from ..difference import difference_reports
from ..plan_tables import alternatives_table, borders_table, stage_table
from ..steps import action_table
from ..table import FittingTable
from .run import Run, have_one_plan


class Tables(NamedTuple):
    """Tables of a run, or of both runs; ``name`` stands above them."""

    name: str
    tables: list[FittingTable]


class Rejected(NamedTuple):
    """The alternatives of a plan, and the options of ``pipepart plan`` that give each of them, by its number."""

    name: str
    table: FittingTable
    options: list[tuple[int, str]]


class Differences(NamedTuple):
    """What two plans differ in."""

    sentences: list[str]
    tables: list[FittingTable]


def stages_section(runs: Sequence[Run]) -> list[Tables]:
    """Return the stages of each plan, what crosses their borders, and measured against predicted times of actions."""
    groups = []
    for number, run in enumerate(runs):
        tables = [] if have_one_plan(runs) and number else [stage_table(run.plan), borders_table(run.plan)]
        if run.trace is not None:
            tables.append(action_table(run.trace))
        groups.append(Tables(run.name, [table for table in tables if table is not None]))
    return groups


def differences_section(runs: Sequence[Run]) -> Differences | None:
    """Return the differences between two plans; None for one run."""
    if len(runs) < 2:
        return None
    first, second = runs
    reports = difference_reports(first.plan, second.plan, (first.name, second.name))
    return Differences(
        [report.plain for report in reports if isinstance(report, Text)],
        [report for report in reports if isinstance(report, FittingTable)],
    )


def rejected_section(runs: Sequence[Run]) -> list[Rejected] | None:
    """Return the alternatives of each plan, with the reason why each was not chosen; None if there are none."""
    one_plan = have_one_plan(runs)
    shown = [
        Rejected(
            "" if one_plan else run.name,
            replace(alternatives_table(run.plan), title="Plans considered"),
            _options(run.plan),
        )
        for run in (runs[:1] if one_plan else runs)
        if run.plan.alternatives and run.plan.prediction
    ]
    return shown or None


def _options(plan: Plan) -> list[tuple[int, str]]:
    return [
        (number, as_options(replace(plan.constraints, **other.keywords).given))
        for number, other in enumerate(plan.alternatives, 1)
        if other.step_seconds is not None
    ]
