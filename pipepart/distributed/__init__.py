"""Runs one pipeline on several processes: ownership of stages, and synchronization before and after calls."""

from .construction import making, planned_once
from .inside_stage import check_parallelize, check_parallelize_given
from .multi_process import join
from .single_process import SingleProcess

__all__ = ["SingleProcess", "check_parallelize", "check_parallelize_given", "join", "making", "planned_once"]
