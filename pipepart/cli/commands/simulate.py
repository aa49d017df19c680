"""``pipepart simulate``: a schedule played on the stages of a plan, or on stages described by numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import schedules

from ...planning import Plan
from .. import options
from ..described import DescribedStages
from ..errors import Mistake, mistakes_told
from ..numbers import parse_choice
from ..output import check_writable, deliver, write_text
from ..played import Order, Played, play_numbers, play_plan
from ..saved_plan import PLAN_HELP, load_plan
from ..simulated import Simulated

if TYPE_CHECKING:
    from rich.console import RenderableType

_PER_STAGE = "one number, or one a stage as in 1,2,1"


def simulate_command(
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PLAN]", show_default=False, help=f"{PLAN_HELP} Left out, numbers describe the stages."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help=f"{', '.join(schedules.names())}, or search for the best that is found; the plan's own if not given.",
        ),
    ] = None,
    schedule_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="A schedule as CSV, a line of actions a device as torch.distributed.pipelining has it, or as JSON.",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="How many; each of the same size."),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default=False, help="Stages of each device; the plan's if not given."
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default=False, help="How many, without a plan.")
    ] = None,
    forward: Annotated[
        str | None,
        typer.Option(
            metavar="S[,S..]",
            show_default=False,
            help=f"Seconds without a plan: {_PER_STAGE}; 1 if not given.",
        ),
    ] = None,
    backward_input: Annotated[
        str | None,
        typer.Option(metavar="S[,S..]", show_default=False, help="The same of the backward for the inputs."),
    ] = None,
    backward_weight: Annotated[
        str | None,
        typer.Option(metavar="S[,S..]", show_default=False, help="The same of the backward for the weights."),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0,
            show_default=False,
            help="Seconds of a message between devices, without a plan.",
        ),
    ] = None,
    stash: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[,SIZE..]",
            show_default=False,
            help="What a stage keeps of a micro-batch in flight, without a plan; if not given, these are counted.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Save the timeline for chrome://tracing or ui.perfetto.dev.",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Save the schedule as CSV.")
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Plays a schedule and says what each device waits for.

    With PLAN, the stages of the plan under another schedule or with another number of micro-batches of the same size.
    Without, as in `pipepart simulate --schedule 1f1b --devices 4 --micro-batches 8 --forward 1,2,1,1`.
    """
    with mistakes_told():
        for path in (trace, csv, output):
            check_writable(path)
        described = DescribedStages(forward, backward_input, backward_weight, latency, stash)
        if schedule is not None:
            parse_choice("--schedule", schedule, (*schedules.names(), "search"))
        order = Order(schedule, schedule_file, devices, micro_batches, chunks)
        _check(order)
        made = None if plan is None else _with_costs(plan, order, described)
        played = play_plan(made, order) if made else play_numbers(order, described.costs)
        timeline = played.timeline()
        if trace is not None:
            write_text(trace, json.dumps(timeline.to_trace()))
        if csv is not None:
            write_text(csv, timeline.schedule.to_csv())
        figures = Simulated.of(played, timeline)
        counted = made is None and stash is None
        deliver(figures, lambda: _reports(played, timeline, made, counted), as_json=as_json, path=output)


def _check(order: Order) -> None:
    if order.file is None:
        return
    if order.name is not None:
        raise Mistake(f"--schedule {order.name} and --schedule-file {order.file} both name a schedule")
    said = {"--devices": order.devices, "--micro-batches": order.micro_batches, "--chunks": order.chunks}
    if given := [option for option, value in said.items() if value is not None]:
        raise Mistake(f"{', '.join(given)}: the schedule in {order.file} says that")


def _with_costs(path: Path, order: Order, described: DescribedStages) -> Plan:
    """The plan, which says what the numbers would say."""
    given = [*(["--devices"] if order.devices else []), *described.given()]
    if given:
        raise Mistake(f"{', '.join(given)} cannot change {path}: leave them out, or leave the plan out")
    plan = load_plan(path)
    if not any(stage.load_seconds for stage in plan.stages):
        raise Mistake(f"{path} has no costs: it was written by hand")
    return plan


def _reports(
    played: Played, timeline: schedules.Timeline, plan: Plan | None, counted: bool
) -> Sequence[RenderableType]:
    from ...reporting import drawn_timeline, idle_table, simulation_summary

    return [
        simulation_summary(timeline, played.bound(), plan.simulate() if plan else None),
        idle_table(
            timeline, played.devices, counted=counted, other_bytes=played.other_bytes, limits=played.limits
        ),
        drawn_timeline(timeline, devices=played.devices),
    ]
