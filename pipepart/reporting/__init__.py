"""Profiles, plans and timelines as people read them in a terminal or a log."""

from .console import report_console, show
from .layers import layer_table, size_table
from .measured import measured_against_plan
from .stages import memory_table, stage_table
from .summary import plan_summary
from .timeline import drawn_timeline

__all__ = [
    "drawn_timeline",
    "layer_table",
    "measured_against_plan",
    "memory_table",
    "plan_summary",
    "report_console",
    "show",
    "size_table",
    "stage_table",
]
