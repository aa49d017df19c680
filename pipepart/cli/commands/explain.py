"""``pipepart explain``: show a saved plan, as EXPLAIN shows the plan of a query."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import user_errors


def explain_command(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", show_default=False, help="A saved plan; it may have been edited."),
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="A measured step of the plan, saved by pipe.trace(): compare it with the prediction.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a saved plan: stages, memory, alternatives, timeline.

    If the file was edited, it is checked, and the costs of its stages are computed again from the profile in it. The
    model is not needed. With --trace and --json the measured step's figures are printed beside the plan.
    """
    with user_errors():
        from ...planning import Plan
        from ...reporting import edited_note, plan_reports, trace_reports
        from ...runtime.observe.trace import Trace
        from ..explained import Explained
        from ..files import as_in_file, read, read_step
        from ..output import deliver

        made = read(Plan, plan)
        before = as_in_file(plan)
        traced = Trace(made, [read_step(trace, made, plan)]) if trace else None

        def reports():
            edited = edited_note(before, made) if before else None
            measured = trace_reports(traced) if traced else []
            return [*([edited] if edited else []), *plan_reports(made), *measured]

        deliver(Explained.of(made, traced) if traced else made, reports, as_json=as_json, path=None)
