"""Checks that pipelines compute the same numbers as the plain model, and names the first layer that differs."""

from .compare import check
from .report import CheckReport, CheckRow, DifferentNumbers, PlainFacts

__all__ = ["CheckReport", "CheckRow", "DifferentNumbers", "PlainFacts", "check"]
