"""One line that compares measured steps with the plan's prediction."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.text import Text

from ...planning import Plan
from ...units import format_seconds


def measured_against_plan(plan: Plan, step_seconds: Sequence[float]) -> Text:
    """Compare the median of measured steps with the predicted step.

    Args:
        plan: what was run.
        step_seconds: measured steps of whole mini-batches, in seconds, without the first ones, which warm up.

    Raises:
        ValueError: no step was measured, or the plan has no prediction.
    """
    if not step_seconds:
        raise ValueError("no step was measured: give the seconds of at least 1")
    predicted, measured = plan.predicted.step_seconds, statistics.median(step_seconds)
    off = measured / predicted - 1
    how = "as predicted" if abs(off) < 0.005 else f"{abs(off):.0%} {'longer' if off > 0 else 'shorter'}"
    return Text.assemble(
        ("Step  ", "bold"),
        f"predicted {format_seconds(predicted)}, measured {format_seconds(measured)} "
        f"(median of {len(step_seconds)}): {how}",
    )
