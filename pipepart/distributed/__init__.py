"""Runs one pipeline on several processes: ownership of stages, and synchronization before and after calls."""

from .construction import making, planned_once
from .inside_stage import check_parallelize, check_parallelize_given
from .multi_process import MultiProcess
from .single_process import SingleProcess

__all__ = [
    "MultiProcess",
    "SingleProcess",
    "check_parallelize",
    "check_parallelize_given",
    "making",
    "planned_once",
]
