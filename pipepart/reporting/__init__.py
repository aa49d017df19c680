"""Formats profiles, plans and timelines as text for a terminal or a log."""

from .bench import BenchResult, bench_table
from .cluster import cluster_report
from .difference import PlanDifference, difference_reports, plan_difference
from .findings import findings
from .layers import layer_table, size_table
from .plan import edited_note, findings_report, plan_reports, plan_summary
from .plan_tables import (
    alternatives_options,
    alternatives_table,
    infeasible_report,
    memory_table,
    stage_table,
)
from .schedules import schedules_table
from .steps import (
    action_table,
    idle_table,
    measured_against_plan,
    simulation_summary,
    trace_reports,
    trace_summary,
)
from .table import show
from .timeline import drawn_timeline
from .verify import check_table

__all__ = [
    "BenchResult",
    "PlanDifference",
    "action_table",
    "alternatives_options",
    "alternatives_table",
    "bench_table",
    "check_table",
    "cluster_report",
    "difference_reports",
    "drawn_timeline",
    "edited_note",
    "findings",
    "findings_report",
    "idle_table",
    "infeasible_report",
    "layer_table",
    "measured_against_plan",
    "memory_table",
    "plan_difference",
    "plan_reports",
    "plan_summary",
    "schedules_table",
    "show",
    "simulation_summary",
    "size_table",
    "stage_table",
    "trace_reports",
    "trace_summary",
]
