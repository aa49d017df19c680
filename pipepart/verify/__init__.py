"""Whether a pipeline gives the numbers of the plain model, and where it does not: which layer, and why it may."""

from .compare import check
from .report import CheckReport, CheckRow, DifferentNumbers, PlainFacts

__all__ = ["CheckReport", "CheckRow", "DifferentNumbers", "PlainFacts", "check"]
