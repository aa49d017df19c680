"""Formats profiles, plans and timelines as text for a terminal or a log."""

from .bench import BenchResult, bench_table
from .cluster import cluster_report
from .difference import difference_reports
from .findings import findings
from .layers import layer_table, size_table
from .plan import findings_report, plan_reports, plan_summary
from .plan_tables import alternatives_table, infeasible_report, memory_table, stage_table
from .simulated import idle_table, schedules_table, simulation_summary
from .steps import action_table, measured_against_plan, trace_reports, trace_summary
from .table import show
from .timeline import drawn_timeline
from .verify import check_table

__all__ = [
    "BenchResult",
    "action_table",
    "alternatives_table",
    "bench_table",
    "check_table",
    "cluster_report",
    "difference_reports",
    "drawn_timeline",
    "findings",
    "findings_report",
    "idle_table",
    "infeasible_report",
    "layer_table",
    "measured_against_plan",
    "memory_table",
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
