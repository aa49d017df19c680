"""``pipepart explain``: show a saved plan, as EXPLAIN shows the plan of a query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import options
from ..errors import with_exit_status
from ..options import option

if TYPE_CHECKING:
    from ...planning import Plan
    from ...runtime.observe.trace import Trace


@with_exit_status
def explain_command(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", show_default=False, help="A saved plan; it may have been edited."),
    ],
    trace: Annotated[
        Path | None,
        option("FILE", "A measured step of the plan, saved by pipe.trace(): compare it with the prediction."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a saved plan: stages, memory, alternatives, timeline.

    If the file was edited, it is checked, and the costs of its stages are computed again from the profile in it. The
    model is not needed. With --trace and --json the measured step's figures are printed beside the plan.
    """
    from ...planning import Plan
    from ...reporting import edited_note, plan_reports, trace_reports
    from ...runtime.observe.trace import Trace
    from ..files import read, read_step
    from ..output import deliver

    made = read(Plan, plan)
    edited = edited_note(Plan.model_validate_json(plan.read_text(encoding="utf-8")), made)
    traced = Trace(made, [read_step(trace, made, plan)]) if trace else None
    deliver(
        _with_measured(made, traced) if traced else made.model_dump_json(indent=1),
        lambda: [
            *([edited] if edited else []),
            *plan_reports(made, trace=traced),
            *(trace_reports(traced) if traced else []),
        ],
        as_json=as_json,
        path=None,
    )


def _with_measured(plan: Plan, trace: Trace) -> str:
    """Return the plan and the median measured step as JSON. ``busy_seconds`` has one number per device."""
    median, predicted = trace.median, trace.predicted
    measured = {
        "step_seconds": median.makespan,
        "predicted_seconds": predicted.makespan if predicted else None,
        "bubble": median.bubble,
        "busy_seconds": list(median.busy),
    }
    return json.dumps(
        {"version": 1, "plan": plan.model_dump(mode="json"), "measured": measured},
        indent=1,
        ensure_ascii=False,
    )
