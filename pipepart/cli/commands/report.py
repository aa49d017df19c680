"""``pipepart report``: write plans and measured steps as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..options import option


def report_command(
    plans: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN [PLAN]",
            show_default=False,
            help="A saved plan, or two to compare; they may be edited.",
        ),
    ],
    trace: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "A measured step of the plan, saved by pipe.trace(); with two plans, give two: the first is of the first "
            "plan.",
        ),
    ] = None,
    output: Annotated[Path, option("FILE", "The page.", "--output", "-o", show_default=True)] = Path(
        "report.html"
    ),
) -> None:
    """Write a plan as one HTML page: what limits it, its timeline, idle time, memory and costs.

    With --trace the measured step stands under the predicted one. With two plans they stand side by side. To compare
    two runs of one plan, name the plan twice. The page needs no other file and no network.
    """
    from ...planning import Plan
    from ...profiling.progress import progress_bar
    from ...reporting.report import Run, report_html
    from ...runtime.observe.trace import Trace
    from ...units import counted
    from ..files import read, read_step
    from ..output import check_writable, write_file

    if len(plans) > 2:
        raise UsageError(f"got {len(plans)} plans: a report shows one, or two side by side")
    traces = trace or []
    if traces and len(traces) != len(plans):
        raise UsageError(
            f"got {counted(len(traces), '--trace', '')} for {counted(len(plans), 'plan')}: give one for each plan, or "
            "none"
        )
    check_writable(output)
    names = _names(plans, traces)
    with progress_bar(None, "writing the report", after=1.0) as done:
        runs = []
        for at, path in enumerate(plans):
            done(at / len(plans))
            plan = read(Plan, path)
            measured = Trace(plan, [read_step(traces[at], plan, path)]) if traces else None
            runs.append(Run(plan, measured, names[at]))
        page = report_html(*runs)
    write_file(output, page)


def _names(plans: list[Path], traces: list[Path]) -> list[str]:
    """Return a name for each run, if there are two: that of the plan's file, else of the trace's, else A and B."""
    if len(plans) < 2:
        return [""]
    for paths in (plans, traces):
        stems = [path.stem for path in paths]
        if len(set(stems)) == 2:
            return stems
    return ["A", "B"]
