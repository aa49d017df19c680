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

    from ...cluster import Device

_MOST_ROWS = 64  # of a table; above it one replica of each class of alike ones is shown
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
        int | None, option("N", "Number of micro-batches, each of the same size.", min=1)
    ] = None,
    chunks: Annotated[int | None, option("N", "Stages per device; the plan's if not given.", min=1)] = None,
    devices: Annotated[int | None, option("N", "Number of devices, without a plan.", min=1)] = None,
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
    """
    import schedules

    from ...planning import Plan
    from ...reporting import drawn_timeline, idle_table, simulation_summary
    from ..files import read, read_schedule
    from ..output import check_writable, deliver, write_text
    from ..what_if import reordered, simulate_order

    check_writable(trace, csv, output)
    if schedule_file is not None and (
        ignored := options.given(context, "schedule", "devices", "micro_batches", "chunks")
    ):
        raise UsageError(f"{', '.join(ignored)}: the schedule in {schedule_file} says that")
    order = read_schedule(schedule_file) if schedule_file else None
    own, names, needs, limits = None, [], [], []
    if plan is not None:
        described = ("devices", "forward", "backward_input", "backward_weight", "latency", "stash")
        if ignored := options.given(context, *described):
            raise UsageError(
                f"{', '.join(ignored)} cannot change {plan}: leave them out, or leave the plan out"
            )
        made = read(Plan, plan)
        if made.profile is None:
            raise UsageError(f"{plan} has no profile to compute costs from: it was written by hand")
        own = made.simulate()
        if order is None:
            moved = reordered(made, schedule, micro_batches, chunks)
            timeline = moved.simulate()
        else:
            moved, timeline = simulate_order(made, order)
        costs = moved.stage_costs()
        names = [device.name for device in moved.workers]
        shown, rows, drawn = moved, names, timeline
        if order is None and len(names) > _MOST_ROWS and moved.replicas > 1:
            shown, classes = moved.one_of_each()
            drawn = moved.simulate_shown(shown, classes)
            rows = _with_sizes(shown.workers, classes.sizes)
        needs = list(shown.device_bytes().values())
        limits = [device.memory_bytes for device in shown.workers]
    else:
        if order is None:
            order = _built(schedule, devices, micro_batches, chunks)
        costs = _stage_costs(order.model_stages, forward, backward_input, backward_weight, latency, stash)
        if schedule == "search":
            order = schedules.search(costs, order.devices, order.micro_batches)
        timeline = schedules.simulate(order, costs)
        names = rows = [str(row) for row in range(order.devices)]
        drawn = timeline
    bound = _bound(timeline.schedule, costs)
    if trace is not None:
        write_text(trace, json.dumps(timeline.to_trace()))
    if csv is not None:
        write_text(csv, timeline.schedule.to_csv())
    deliver(
        _as_json(timeline, names, bound) if as_json or output else "",
        lambda: [
            simulation_summary(timeline, bound, own),
            idle_table(drawn, rows, counted=own is None and stash is None, needs=needs, limits=limits),
            drawn_timeline(drawn, devices=rows if own else ()),
        ],
        as_json=as_json,
        path=output,
    )


def _with_sizes(workers: Sequence[Device], sizes: Sequence[int]) -> list[str]:
    """Return the names of the devices of one replica of each class, with the number of replicas that are like it."""
    each = len(workers) // len(sizes)
    counts = [size for size in sizes for _ in range(each)]
    return [
        device.name if size == 1 else f"{device.name} (1 of {size} alike)"
        for device, size in zip(workers, counts, strict=True)
    ]


def _built(name: str | None, devices: int | None, micro_batches: int | None, chunks: int | None) -> Schedule:
    """Build the schedule of stages that numbers describe; for a search, one of the same stages."""
    import schedules

    if name is None or devices is None or micro_batches is None:
        raise UsageError(
            "give a saved plan, or describe the stages: --schedule 1f1b --devices 4 --micro-batches 8"
        )
    if name == "search":
        return schedules.build("looped-bfs", devices, micro_batches, chunks or 1)
    return schedules.build(name, devices, micro_batches, chunks)


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

    def per_stage(option: str, numbers: Sequence[float]) -> list[float]:
        if len(numbers) not in (1, stages):
            raise UsageError(f"{option} has {len(numbers)} numbers for {stages} stages: give 1 or {stages}")
        return [float(number) for number in numbers] * (stages if len(numbers) == 1 else 1)

    return StageCosts(
        forward=per_stage("--forward", forward),
        backward_input=per_stage("--backward-input", backward_input),
        backward_weight=per_stage("--backward-weight", backward_weight),
        latency=latency,
        stash_bytes=per_stage("--stash", [parse_bytes(size) for size in stash.split(",")] if stash else [1]),
    )


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
