"""``pipepart simulate``: run a schedule on the stages of a plan, or on stages described by numbers, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..played import Played

_COSTS = ("forward", "backward_input", "backward_weight", "stash")
_MOST_ACTIONS = 4_000_000  # forwards and backwards; these take a minute and a few GiB
_PER_STAGE = "one number for a device, shared by its stages, or one per stage as in 1,2,1"


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
        list[Any] | None,
        option(
            "NAME",
            f"search for the best that is found, or one of {options.SCHEDULE_LIST}; the plan's own if not "
            "given. Repeat it for a table of schedules.",
            group="Schedule",
            words=(*options.SCHEDULES, "search"),
        ),
    ] = None,
    schedule_file: Annotated[
        Path | None,
        option(
            "FILE",
            "A schedule as JSON, or as CSV with one line of actions per device, as torch.distributed.pipelining "
            "writes it.",
            group="Schedule",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        option("N", "Number of micro-batches, each of the same size.", min=1, group="Schedule"),
    ] = None,
    chunks: Annotated[
        int | None, option("N", "Stages per device; the plan's if not given.", min=1, group="Schedule")
    ] = None,
    devices: Annotated[
        int | None,
        option("N", "Number of devices, without a plan.", min=1, group="Stages described by numbers"),
    ] = None,
    forward: Annotated[
        Any,
        option(
            "S[,S..]",
            f"Seconds of a forward, without a plan: {_PER_STAGE}.",
            options.costs,
            group="Stages described by numbers",
        ),
    ] = "1",
    backward_input: Annotated[
        Any,
        option(
            "S[,S..]",
            "The same for the backward for inputs.",
            options.costs,
            group="Stages described by numbers",
        ),
    ] = "1",
    backward_weight: Annotated[
        Any,
        option(
            "S[,S..]",
            "The same for the backward for weights.",
            options.costs,
            group="Stages described by numbers",
        ),
    ] = "1",
    latency: Annotated[
        float,
        option(
            "S",
            "Seconds that a message between devices takes, without a plan.",
            min=0,
            show_default=True,
            group="Stages described by numbers",
        ),
    ] = 0.0,
    stash: Annotated[
        str | None,
        option(
            "SIZE[,SIZE..]",
            "Bytes kept per micro-batch in flight, without a plan. If not given, micro-batches are counted.",
            options.size,
            group="Stages described by numbers",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        option("FILE", "Save the timeline for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    as_json: options.AsJson = False,
    output: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "Save FILE.svg or FILE.png: a picture; FILE.csv: the schedule; FILE.json: the figures. Repeatable.",
            names=("--output", "-o"),
        ),
    ] = None,
) -> None:
    """Simulate a schedule; show what each device waits for.

    With PLAN: the plan's stages under another schedule, or with another number of micro-batches of the same size.
    Without: stages described by numbers. Repeat --schedule for a table that compares schedules.
    """
    from pydantic_core import to_json

    from ...planning import Plan
    from ...reporting import drawn_timeline, idle_table, schedules_table, simulation_summary
    from ..described_stages import DescribedStages, built
    from ..files import read, read_schedule
    from ..output import check_writable, deliver, write_bytes
    from ..played import play_numbers, play_plan, traced
    from ..results import SimulatedSteps
    from ..simulated_files import check_suffixes, write_simulated

    names, files = schedule or [None], output or []
    check_suffixes(files, len(names))
    check_writable(trace, *files)
    for source, cannot_change in (
        (schedule_file, ("schedule", "devices", "micro_batches", "chunks")),
        (plan, ("devices", *_COSTS, "latency")),
    ):
        if source is not None and (ignored := options.given(context, *cannot_change)):
            raise UsageError(f"{', '.join(ignored)} cannot change {source}: leave out one or the other")
    order = read_schedule(schedule_file) if schedule_file else None
    stages = DescribedStages(forward, backward_input, backward_weight, stash)
    made = None if plan is None else read(Plan, plan)
    if made is not None and made.profile is None:
        raise UsageError(f"{plan} has no profile to compute costs from: it was written by hand")

    def play(name: str | None) -> Played:
        if made is not None:
            _check_number_of_actions(len(made.stages), micro_batches or made.micro_batches)
            return play_plan(made, order, name, micro_batches, chunks)
        ordered = order or built(*_needed(name, devices, micro_batches, chunks), chunks)
        return play_numbers(stages, ordered, latency, search=name == "search")

    played = list(map(play, names))
    figures = tuple(each.figures for each in played)
    result = (figures[0] if len(names) == 1 else SimulatedSteps(schedules=figures)).model_dump_json(indent=1)
    if trace is not None:
        write_bytes(trace, to_json(traced(played)))
    write_simulated(files, played, result)
    counted = plan is None and stash is None

    def reports() -> list[RenderableType]:
        if len(played) > 1:
            memory = "in flight" if counted else "stash" if made is None else "memory"
            return [
                schedules_table(
                    [each.timeline for each in played],
                    [each.needs or each.timeline.peak_bytes for each in played],
                    memory=memory,
                    limits=[each.limits for each in played] if played[0].limits else (),
                )
            ]
        one = played[0]
        own = None if made is None else made.simulate()
        return [
            simulation_summary(one.timeline, one.bound, own),
            idle_table(one.drawn, one.rows, counted=counted, needs=one.needs, limits=one.limits),
            drawn_timeline(one.drawn, devices=() if plan is None else one.rows),
        ]

    deliver(result, reports, as_json=as_json, path=None)


def _needed(
    schedule: str | None, devices: int | None, micro_batches: int | None, chunks: int | None
) -> tuple[str, int, int]:
    """Return the options that described stages need."""
    if schedule is None or devices is None or micro_batches is None:
        raise UsageError(
            "give a saved plan, or describe the stages: --schedule 1f1b --devices 4 --micro-batches 8"
        )
    _check_number_of_actions(devices * (chunks or 1), micro_batches)
    return schedule, devices, micro_batches


def _check_number_of_actions(stages: int, micro_batches: int) -> None:
    count = 2 * stages * micro_batches
    if count > _MOST_ACTIONS:
        raise UsageError(
            f"{micro_batches:,} micro-batches on {stages:,} stages make {count:,} forwards and backwards: at most "
            f"{_MOST_ACTIONS:,} are simulated"
        )
