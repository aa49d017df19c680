"""Profiles, plans and timelines as people read them in a terminal or a log."""

from .alternatives import alternatives_table
from .checked import check_table
from .console import report_console, show
from .edited import edited_note
from .infeasible import infeasible_report
from .layers import layer_table, size_table
from .measured import measured_against_plan
from .memory import memory_table
from .plan import plan_reports
from .simulated import idle_table, simulation_summary
from .stages import stage_table
from .summary import plan_summary
from .timeline import drawn_timeline
from .traced import action_table, trace_reports, trace_summary

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
