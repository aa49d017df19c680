"""``pipepart simulate``: run a schedule on the stages of a plan, or on stages described by numbers, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options, parsers
from ..errors import UsageError, user_errors

if TYPE_CHECKING:
    from schedules import StageCosts

    from ...planning import Plan

_PER_STAGE = "one number, or one per stage as in 1,2,1"


def _costs_option(help_text: str) -> Any:
    return typer.Option(parser=parsers.costs, metavar="S[,S..]", show_default=False, help=help_text)


def simulate_command(
    context: typer.Context,
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PLAN]",
            show_default=False,
            help="A saved plan. Without one, numbers describe the stages.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            parser=parsers.choice(*parsers.SCHEDULES, "search"),
            metavar="NAME",
            show_default=False,
            help=f"search for the best that is found, or one of {', '.join(parsers.SCHEDULES)}; the plan's own if "
            "not given.",
        ),
    ] = None,
    schedule_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="A schedule as JSON, or as CSV with one line of actions per device, as torch.distributed.pipelining "
            "writes it.",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default=False, help="Number of micro-batches, each of the same size."
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default=False, help="Stages per device; the plan's if not given."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="Number of devices, without a plan."),
    ] = None,
    forward: Annotated[Any, _costs_option(f"Seconds of a forward, without a plan: {_PER_STAGE}.")] = "1",
    backward_input: Annotated[Any, _costs_option("The same for the backward for inputs.")] = "1",
    backward_weight: Annotated[Any, _costs_option("The same for the backward for weights.")] = "1",
    latency: Annotated[
        float,
        typer.Option(
            metavar="S", min=0, help="Seconds that a message between devices takes, without a plan."
        ),
    ] = 0.0,
    stash: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[,SIZE..]",
            show_default=False,
            help="Bytes kept per micro-batch in flight, without a plan. If not given, micro-batches are counted.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Save the timeline for ui.perfetto.dev or chrome://tracing.",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Save the schedule as CSV.")
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Simulate a schedule; show what each device waits for.

    With PLAN: the plan's stages under another schedule, or with another number of micro-batches of the same size.
    Without: stages described by numbers, as in
    `pipepart simulate --schedule 1f1b --devices 4 --micro-batches 8 --forward 1,2,1,1`.
    """
    with user_errors():
        from ...planning import Plan
        from ...reporting import drawn_timeline, idle_table, simulation_summary
        from ..files import check_writable, read
        from ..output import deliver, write_text
        from ..simulated import Simulated
        from ..what_if import Order, play_numbers, play_plan

        check_writable(trace, csv, output)
        order = Order(schedule, schedule_file, devices, micro_batches, chunks)
        _check_schedule_file(context, order.file)
        made = None
        if plan is not None:
            described = ("devices", "forward", "backward_input", "backward_weight", "latency", "stash")
            if ignored := options.given(context, *described):
                raise UsageError(
                    f"{', '.join(ignored)} cannot change {plan}: leave them out, or leave the plan out"
                )
            made = read(Plan, plan)
            _check_costs(made, plan)
            played = play_plan(made, order)
        else:

            def costs(stages: int) -> StageCosts:
                return _stage_costs(stages, forward, backward_input, backward_weight, latency, stash)

            played = play_numbers(order, costs)
        timeline = played.timeline()
        if trace is not None:
            write_text(trace, json.dumps(timeline.to_trace()))
        if csv is not None:
            write_text(csv, timeline.schedule.to_csv())

        def reports():
            return [
                simulation_summary(timeline, played.bound(), made.simulate() if made else None),
                idle_table(
                    timeline,
                    played.devices,
                    counted=made is None and stash is None,
                    other_bytes=played.other_bytes,
                    limits=played.limits,
                ),
                drawn_timeline(timeline, devices=played.devices),
            ]

        deliver(Simulated.of(played, timeline), reports, as_json=as_json, path=output)


def _check_schedule_file(context: typer.Context, path: Path | None) -> None:
    if path is None:
        return
    if ignored := options.given(context, "schedule", "devices", "micro_batches", "chunks"):
        raise UsageError(f"{', '.join(ignored)}: the schedule in {path} says that")


def _check_costs(plan: Plan, path: Path) -> None:
    if not any(stage.load_seconds for stage in plan.stages):
        raise UsageError(f"{path} has no costs: it was written by hand")


def _stage_costs(
    stages: int,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    latency: float,
    stash: str | None,
) -> StageCosts:
    """Return the costs of ``stages`` stages. Without stash sizes each stash is 1: it counts micro-batches in flight."""
    from schedules import StageCosts

    from ...units import parse_bytes

    return StageCosts(
        forward=_per_stage("--forward", forward, stages),
        backward_input=_per_stage("--backward-input", backward_input, stages),
        backward_weight=_per_stage("--backward-weight", backward_weight, stages),
        latency=latency,
        stash_bytes=_per_stage(
            "--stash", [parse_bytes(size) for size in stash.split(",")] if stash else [1], stages
        ),
    )


def _per_stage(option: str, numbers: Sequence[float], stages: int) -> list[float]:
    if len(numbers) not in (1, stages):
        raise UsageError(f"{option} has {len(numbers)} numbers for {stages} stages: give 1 or {stages}")
    return [float(number) for number in numbers] * (stages if len(numbers) == 1 else 1)
