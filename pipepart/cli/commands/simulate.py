"""``pipepart simulate``: run a schedule on the stages of a plan, or on stages described by numbers, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option

if TYPE_CHECKING:
    from schedules import Schedule, StageCosts, Timeline

_COSTS = ("forward", "backward_input", "backward_weight", "stash")
_OF_CLUSTER = ("replicas", "message", "gradients")
_PER_STAGE = "one number, or one per stage as in 1,2,1"


@with_exit_status
def simulate_command(
    context: typer.Context,
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN", show_default=False, help="A saved plan. Without one, numbers describe the stages."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        option(
            "NAME",
            f"search for the best that is found, or one of {options.SCHEDULE_LIST}; the plan's own if not "
            "given.",
            options.choice(*options.SCHEDULES, "search"),
        ),
    ] = None,
    schedule_file: Annotated[
        Path | None,
        option(
            "FILE",
            "A schedule as JSON, or as CSV with one line of actions per device, as torch.distributed.pipelining "
            "writes it.",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None, option("N", "Number of micro-batches, each of the same size; of all replicas.", min=1)
    ] = None,
    chunks: Annotated[int | None, option("N", "Stages per device; the plan's if not given.", min=1)] = None,
    devices: Annotated[
        int | None, option("N", "Number of devices of a replica, without a plan.", min=1)
    ] = None,
    cluster: Annotated[
        Path | None,
        option(
            "FILE", "Without a plan: put the stages on the devices of this cluster, made by Cluster.save."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        option("N", "Replicas of the stages on --cluster, each with a part of the micro-batches.", min=1),
    ] = None,
    message: Annotated[
        str | None, option("SIZE", "What a stage sends to the next for a micro-batch, on --cluster.")
    ] = None,
    gradients: Annotated[
        str | None, option("SIZE", "Gradients of a stage that replicas sum, on --cluster.")
    ] = None,
    forward: Annotated[
        Any, option("S[,S..]", f"Seconds of a forward, without a plan: {_PER_STAGE}.", options.costs)
    ] = "1",
    backward_input: Annotated[
        Any, option("S[,S..]", "The same for the backward for inputs.", options.costs)
    ] = "1",
    backward_weight: Annotated[
        Any, option("S[,S..]", "The same for the backward for weights.", options.costs)
    ] = "1",
    latency: Annotated[
        float,
        option(
            "S", "Seconds that a message between devices takes, without a plan.", min=0, show_default=True
        ),
    ] = 0.0,
    stash: Annotated[
        str | None,
        option(
            "SIZE[,SIZE..]",
            "Bytes kept per micro-batch in flight, without a plan. If not given, micro-batches are counted.",
        ),
    ] = None,
    trace: Annotated[
        Path | None, option("FILE", "Save the timeline for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    csv: Annotated[Path | None, option("FILE", "Save the schedule as CSV.")] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
) -> None:
    """Simulate a schedule; show what each device waits for.

    With PLAN: the plan's stages under another schedule, or with another number of micro-batches of the same size.
    Without: stages described by numbers, as in
    `pipepart simulate --schedule 1f1b --devices 4 --micro-batches 8 --forward 1,2,1,1`.
    With --cluster these stages run on its devices and links, and --replicas of them train together.
    """
    from ...cluster import Cluster
    from ...planning import Plan
    from ...reporting import drawn_timeline, idle_table, simulation_summary
    from ..described_stages import DescribedStages, built
    from ..files import read, read_schedule
    from ..output import check_writable, deliver, write_text
    from ..played import play_numbers, play_plan

    check_writable(trace, csv, output)
    for source, cannot_change in (
        (schedule_file, ("schedule", "devices", "micro_batches", "chunks", "cluster")),
        (plan, ("devices", *_COSTS, "latency", "cluster", *_OF_CLUSTER)),
        (cluster, ("latency",)),
    ):
        if source is not None and (ignored := options.given(context, *cannot_change)):
            raise UsageError(f"{', '.join(ignored)} cannot change {source}: leave out one or the other")
    if cluster is None and (ignored := options.given(context, *_OF_CLUSTER)):
        raise UsageError(f"{', '.join(ignored)} goes with --cluster FILE")
    order = read_schedule(schedule_file) if schedule_file else None
    stages = DescribedStages(forward, backward_input, backward_weight, stash)
    made, own = None, None
    if plan is not None:
        made = read(Plan, plan)
        if made.profile is None:
            raise UsageError(f"{plan} has no profile to compute costs from: it was written by hand")
        own = made.simulate()
        played = play_plan(made, order, schedule, micro_batches, chunks)
    elif cluster is not None:
        where = read(Cluster, cluster)
        devices = devices or len(where) // (replicas or 1)
        made = stages.on_cluster(
            where, *_needed(schedule, devices, micro_batches), chunks, replicas or 1, message, gradients
        )
        played = play_plan(made, None, None, None, None)
    else:
        order = order or built(*_needed(schedule, devices, micro_batches), chunks)
        played = play_numbers(stages, order, latency, search=schedule == "search")
    timeline = played.timeline
    bound = _bound(timeline.schedule, played.costs)
    if trace is not None:
        write_text(trace, json.dumps(timeline.to_trace()))
    if csv is not None:
        write_text(csv, timeline.schedule.to_csv())
    deliver(
        _as_json(timeline, played.names, bound) if as_json or output else "",
        lambda: [
            simulation_summary(timeline, bound, own),
            idle_table(
                played.drawn,
                played.rows,
                counted=made is None and stash is None,
                needs=played.needs,
                limits=played.limits,
            ),
            drawn_timeline(played.drawn, devices=played.rows if made else ()),
        ],
        as_json=as_json,
        path=output,
    )


def _needed(schedule: str | None, devices: int | None, micro_batches: int | None) -> tuple[str, int, int]:
    """Return the options that described stages need."""
    if schedule is None or devices is None or micro_batches is None:
        raise UsageError(
            "give a saved plan, or describe the stages: --schedule 1f1b --devices 4 --micro-batches 8"
        )
    return schedule, devices, micro_batches


def _bound(schedule: Schedule, costs: StageCosts) -> float:
    """Return seconds that no synchronous schedule of this placement can beat; 0 if unknown."""
    import schedules

    if schedule.versions or schedule.replicas > 1:
        return 0.0
    return schedules.bound(costs, schedule.devices, schedule.micro_batches, placement=schedule.device_of)


def _as_json(timeline: Timeline, names: Sequence[str], bound: float) -> str:
    """Return the figures of a timeline as JSON: of the step, and per device the idle seconds by cause.

    ``zero_bubble`` is the bubble if each device starts its next step as soon as it has finished this one.
    """
    schedule = timeline.schedule
    devices = [
        {
            "device": names[row],
            "stages": list(schedule.stages_of(row)),
            "busy_seconds": timeline.busy[row],
            "producer_seconds": idle.producer,
            "transfer_seconds": idle.transfer,
            "finished_seconds": idle.finished,
            "peak_stash_bytes": timeline.peak_bytes[row],
        }
        for row, idle in enumerate(timeline.idle)
    ]
    figures = {
        "version": 1,
        "schedule": schedule.name,
        "micro_batches": schedule.micro_batches,
        "makespan_seconds": timeline.makespan,
        "bubble": timeline.bubble,
        "zero_bubble": timeline.zero_bubble,
        "bound_seconds": bound,
        "devices": devices,
        "actions": [list(map(str, row)) for row in schedule.actions],
    }
    return json.dumps(figures, indent=1)
