"""``pipepart simulate``: run a schedule on the stages of a plan, or on stages described by numbers, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..errors import UsageError
from ..options import option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..simulated import Simulated

_MOST_SECONDS = 1e6  # of one action
_NUMBERS = "Stages described by numbers"
_PER_STAGE = "one number for a device, shared by its stages, or one per stage as in 1,2,1"
_WIDTH = 900  # pixels of a picture
_SUFFIXES = (".svg", ".csv", ".json")


def _seconds(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give {_PER_STAGE}") from None
    if not all(0 <= number <= _MOST_SECONDS for number in numbers):
        raise typer.BadParameter(f"{text!r}: costs are seconds from 0 to {_MOST_SECONDS:g}")
    return numbers


def simulate_command(
    context: typer.Context,
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN", show_default=False, help="A saved plan. Without one, numbers describe the stages."
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        option(
            "NAME|FILE",
            f"One of {options.SCHEDULE_LIST}; or a file: JSON of Schedule.to_json, or CSV with one line of actions per "
            "device, as torch.distributed.pipelining writes it. The plan's own if not given. Repeat it for a table.",
        ),
    ] = None,
    micro_batches: Annotated[
        int | None, option("N", "Number of micro-batches, each of the same size.", min=1)
    ] = None,
    devices: Annotated[int | None, option("N", "Number of devices.", min=1, group=_NUMBERS)] = None,
    chunks: Annotated[int | None, option("N", "Stages per device.", min=1, group=_NUMBERS)] = None,
    forward: Annotated[
        Any, option("S[,S..]", f"Seconds of a forward: {_PER_STAGE}.", parser=_seconds, group=_NUMBERS)
    ] = "1",
    backward_input: Annotated[
        Any,
        option("S[,S..]", "The same for the backward for inputs.", parser=_seconds, group=_NUMBERS),
    ] = "1",
    backward_weight: Annotated[
        Any,
        option("S[,S..]", "The same for the backward for weights.", parser=_seconds, group=_NUMBERS),
    ] = "1",
    latency: Annotated[
        float,
        option(
            "S",
            "Seconds that a message between devices takes.",
            min=0,
            show_default=True,
            group=_NUMBERS,
        ),
    ] = 0.0,
    stash: Annotated[
        str | None,
        option(
            "SIZE[,SIZE..]",
            "Bytes kept per micro-batch in flight. If not given, micro-batches are counted.",
            group=_NUMBERS,
        ),
    ] = None,
    as_json: options.AsJson = False,
    output: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "Save FILE.svg: a picture; FILE.csv: the schedule; FILE.json: the figures. Repeatable.",
            "--output",
            "-o",
        ),
    ] = None,
) -> None:
    """Simulate a schedule; show what each device waits for.

    With PLAN: the plan's stages, where they are, also under another schedule or with another number of micro-batches of
    the same size. Without: stages described by numbers. Repeat --schedule for a table that compares schedules.
    """
    from ...planning import Plan
    from ...reporting import drawn_timeline, idle_table, plan_summary, schedules_table, simulation_summary
    from ...units import parse_bytes
    from ..files import read
    from ..output import check_writable, deliver
    from ..simulated import SimulatedSteps, build, on_described_stages, on_plan

    files = output or []
    _check_suffixes(files, len(schedule or [""]))
    check_writable(*files)
    described = (
        "devices", "chunks", "forward", "backward_input", "backward_weight", "latency", "stash"
    )  # fmt: skip
    if plan is not None:
        if ignored := options.set_by_user(context, *described):
            raise UsageError(f"{', '.join(ignored)} cannot change {plan}: leave out one or the other")
        saved = read(Plan, plan)
        if saved.profile is None:
            raise UsageError(f"{plan} has no profile to compute costs from: it was written by hand")
        steps = [on_plan(saved, name, micro_batches) for name in schedule or [None]]
    else:
        numbers = {
            "forward": forward,
            "backward_input": backward_input,
            "backward_weight": backward_weight,
            "stash_bytes": [parse_bytes(size) for size in stash.split(",")] if stash else [1.0],
        }
        steps = [
            on_described_stages(build(name, devices, micro_batches, chunks), latency, **numbers)
            for name in schedule or [""]
        ]
    figures = SimulatedSteps(schedules=tuple(step.figures for step in steps))
    for file in files:
        _save(file, steps, figures.model_dump_json(indent=1) + "\n")
    in_flight = plan is None and stash is None

    def reports() -> list[RenderableType]:
        if len(steps) > 1:
            memory = "memory" if plan else "in flight" if in_flight else "stash"
            return [
                schedules_table(
                    [step.timeline for step in steps], [max(step.peaks) for step in steps], memory=memory
                )
            ]
        (step,) = steps
        return [
            plan_summary(step.plan) if step.plan else simulation_summary(step.timeline, step.bound),
            idle_table(step.timeline, step.devices, in_flight=in_flight),
            drawn_timeline(step.timeline, devices=step.devices if plan else ()),
        ]

    deliver(figures, reports, as_json=as_json, path=None)


def _check_suffixes(files: list[Path], schedules: int) -> None:
    """Check that each file of -o can be written, before anything is simulated."""
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise UsageError(f"-o {file}: the suffix says what to save, give one of {', '.join(_SUFFIXES)}")
        if file.suffix == ".csv" and schedules > 1:
            raise UsageError(f"-o {file} holds one schedule, and {schedules} are given: save each by itself")


def _save(file: Path, steps: list[Simulated], figures: str) -> None:
    """Write a file of -o; several steps share a picture."""
    from schedules.pictures.svg import PictureError, to_svg

    from ..output import write_file

    panels = [step.panel for step in steps]
    try:
        if file.suffix == ".svg":
            write_file(file, to_svg(panels, _WIDTH, None))
    except PictureError as error:
        raise UsageError(f"-o {file}: {error}") from None
    if file.suffix == ".csv":
        write_file(file, steps[0].timeline.schedule.to_csv())
    elif file.suffix == ".json":
        write_file(file, figures)
