"""``pipepart explain``: a plan that was saved, as EXPLAIN shows the plan of a query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from schedules import ScheduleError, Timeline

from ...planning import Plan
from .. import options
from ..errors import Mistake, mistakes_told
from ..output import deliver
from ..reports import plan_reports
from ..saved_plan import PlanFile, as_in_file, load_plan


def explain_command(
    plan: PlanFile,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="A measured step of the plan, saved by pipe.trace(): also hold it against the prediction.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Shows a plan that was saved, edited or not.

    Its stages, memory, alternatives and predicted timeline. An edited file is checked, and what its stages cost is
    computed anew from the profile in it: the model is not needed.
    """
    with mistakes_told():
        made = load_plan(plan)
        before = as_in_file(plan)
        step = _step(made, plan, trace) if trace else None

        def reports():
            from ...reporting import edited_note, trace_reports
            from ...runtime.observe.trace import Trace

            edited = edited_note(before, made) if before else None
            traced = trace_reports(Trace(made, [step])) if step else []
            return [*([edited] if edited else []), *plan_reports(made), *traced]

        deliver(made, reports, as_json=as_json, path=None)


def _step(plan: Plan, plan_path: Path, path: Path) -> Timeline:
    """The measured step in a file."""
    try:
        step = Timeline.from_trace(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, ScheduleError) as error:
        raise Mistake(f"{path} is no trace that pipe.trace() has saved: {error}") from None
    found, expected = step.schedule, plan.build_schedule()
    if (found.device_of, found.micro_batches) != (expected.device_of, expected.micro_batches):
        raise Mistake(
            f"{path} is no step of {plan_path}: it has {found.micro_batches} micro-batches and stages on devices "
            f"{list(found.device_of)}, the plan {expected.micro_batches} and {list(expected.device_of)}"
        )
    return step
