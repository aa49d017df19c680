"""A plan as `plan` and `explain` print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType


def plan_reports(plan: Plan, compact: bool = False) -> list[RenderableType]:
    """Summary, tables and timeline; what a plan that was written by hand does not have is left out.

    Args:
        plan: to show.
        compact: of the alternatives only some.
    """
    from ..reporting import alternatives_table, drawn_timeline, memory_table, plan_summary, stage_table

    reports: list[RenderableType] = [plan_summary(plan), stage_table(plan), memory_table(plan)]
    if plan.prediction is not None and plan.alternatives:
        reports.append(alternatives_table(plan, compact))
    if any(stage.load_seconds for stage in plan.stages):
        names = [device.name for device in plan.workers]
        reports.append(drawn_timeline(plan.simulate(), "Predicted timeline of one step", names))
    return reports
