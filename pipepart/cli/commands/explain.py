"""``pipepart explain``: show a saved plan, as EXPLAIN shows the plan of a query, or what differs between two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option

if TYPE_CHECKING:
    from ...runtime.observe.trace import Trace


@with_exit_status
def explain_command(
    plans: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN [PLAN]",
            show_default=False,
            help="A saved plan, or two to compare; they may have been edited.",
        ),
    ],
    trace: Annotated[
        Path | None,
        option(
            "FILE",
            "A measured step of the plan, saved by `pipepart bench --trace` or pipe.trace(): compare it with the "
            "prediction.",
        ),
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Show a saved plan: what limits it, stages, memory, alternatives, timeline. Or what differs between two.

    If the file was edited, it is checked, and the costs of its stages are computed again from the profile in it. The
    model is not needed. With --trace and --json the measured step's figures are printed beside the plan.
    """
    from ...planning import Plan
    from ...reporting import difference_reports, edited_note, plan_difference, plan_reports, trace_reports
    from ...runtime.observe.trace import Trace
    from ..files import read, read_step
    from ..output import check_writable, deliver

    check_writable(output)
    if len(plans) > 2:
        raise UsageError(f"got {len(plans)} plans: give one to show, or two to compare")
    if len(plans) == 2:
        if trace is not None:
            raise UsageError(f"--trace {trace} goes with one plan: explain each of the two with its own")
        before, after = (read(Plan, path) for path in plans)
        one, other = plans
        names = (one.stem, other.stem) if one.stem != other.stem else (str(one), str(other))
        deliver(
            plan_difference(before, after).model_dump_json(indent=1),
            lambda: difference_reports(before, after, names),
            as_json=as_json,
            path=output,
        )
        return
    path = plans[0]
    made = read(Plan, path)
    edited = edited_note(Plan.model_validate_json(path.read_text(encoding="utf-8")), made)
    traced = Trace(made, [read_step(trace, made, path)]) if trace else None
    deliver(
        _with_measured(traced) if traced else made.model_dump_json(indent=1),
        lambda: [
            *([edited] if edited else []),
            *plan_reports(made, trace=traced),
            *(trace_reports(traced) if traced else []),
        ],
        as_json=as_json,
        path=output,
    )


def _with_measured(trace: Trace) -> str:
    """Return the plan and the median measured step as JSON."""
    from ..results import ExplainedTrace, MeasuredStep

    median, predicted = trace.median, trace.predicted
    measured = MeasuredStep(
        step_seconds=median.makespan,
        predicted_seconds=predicted.makespan if predicted else None,
        bubble=median.bubble,
        busy_seconds=tuple(median.busy),
    )
    return ExplainedTrace(plan=trace.plan, measured=measured).model_dump_json(indent=1)
