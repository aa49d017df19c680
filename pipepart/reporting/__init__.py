"""Formats profiles, plans and timelines as text for a terminal or a log."""

from .kit.console import report_console, show
from .layers import layer_table, size_table
from .plan.alternatives import alternatives_table
from .plan.edited import edited_note
from .plan.infeasible import infeasible_report
from .plan.memory import memory_table
from .plan.overview import plan_reports
from .plan.stages import stage_table
from .plan.summary import plan_summary
from .steps.measured import measured_against_plan
from .steps.simulated import idle_table, simulation_summary
from .steps.timeline import drawn_timeline
from .steps.traced import action_table, trace_reports, trace_summary
from .verify import check_table

__all__ = [
    "action_table",
    "alternatives_table",
    "check_table",
    "drawn_timeline",
    "edited_note",
    "idle_table",
    "infeasible_report",
    "layer_table",
    "measured_against_plan",
    "memory_table",
    "plan_reports",
    "plan_summary",
    "report_console",
    "show",
    "simulation_summary",
    "size_table",
    "stage_table",
    "trace_reports",
    "trace_summary",
]
