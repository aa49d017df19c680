"""Runs one pipeline on several processes: ownership of stages, and synchronization before and after calls."""

from .multi_process import join, making, planned_once
from .single_process import SingleProcess

__all__ = ["SingleProcess", "join", "making", "planned_once"]
