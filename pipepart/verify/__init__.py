"""Checks that pipelines give the numbers of the plain model; if not, names the first layer that differs."""

from .compare import check
from .report import CheckReport, CheckRow, DifferentNumbers, PlainFacts

__all__ = ["CheckReport", "CheckRow", "DifferentNumbers", "PlainFacts", "check"]
