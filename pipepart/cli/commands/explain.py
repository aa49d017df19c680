"""``pipepart explain``: show a saved plan, as EXPLAIN shows the plan of a query, or what differs between two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..options import option


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
) -> None:
    """Show a saved plan: what limits it, stages, memory, alternatives, timeline. Or what differs between two.

    If the file was edited, it is checked, and the costs of its stages are computed again from the profile in it. The
    model is not needed.
    """
    from ...planning import Plan
    from ...reporting import difference_reports, plan_reports, show, trace_reports
    from ...runtime.observe.trace import Trace
    from ..files import read, read_step

    if len(plans) > 2:
        raise UsageError(f"got {len(plans)} plans: give one to show, or two to compare")
    read_plans = [read(Plan, path) for path in plans]
    if len(plans) == 2:
        if trace is not None:
            raise UsageError(f"--trace {trace} goes with one plan: explain each of the two with its own")
        stems = [path.stem for path in plans]
        first, second = stems if len(set(stems)) == 2 else map(str, plans)
        before, after = read_plans
        show(*difference_reports(before, after, (first, second)))
        return
    (plan,) = read_plans
    traced = Trace(plan, [read_step(trace, plan, plans[0])]) if trace else None
    show(*plan_reports(plan, trace=traced), *(trace_reports(traced) if traced else []))
