"""A plan as ``pipepart plan`` and ``pipepart explain`` print it."""

from __future__ import annotations

from rich.console import RenderableType

from ...planning import Plan
from ..steps.timeline import drawn_timeline
from .alternatives import alternatives_table
from .memory import memory_table
from .stages import stage_table
from .summary import plan_summary


def plan_reports(plan: Plan, compact: bool = False) -> list[RenderableType]:
    """Summary, tables and timeline of a plan; a plan written by hand has fewer.

    Args:
        plan: the plan to show.
        compact: show only some of the alternatives.
    """
    reports: list[RenderableType] = [plan_summary(plan), stage_table(plan), memory_table(plan)]
    if plan.prediction is not None and plan.alternatives:
        reports.append(alternatives_table(plan, compact))
    if any(stage.load_seconds for stage in plan.stages):
        names = [device.name for device in plan.workers]
        reports.append(drawn_timeline(plan.simulate(), "Predicted timeline of one step", names))
    return reports
