"""The first section of the report: what limits the plan, and its main figures."""

from __future__ import annotations

from collections.abc import Sequence

from .run import Run
from .section import Section, render


def summary_section(runs: Sequence[Run]) -> Section:
    """Return the main figures of each run."""
    return Section("summary", "Summary", render("summary.html", runs=runs))
