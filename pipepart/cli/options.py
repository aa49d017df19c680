"""Options of the command line that several commands share, and parsers of option values.

It imports nothing heavy, so that a wrong value is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from ..whole_file import is_stream

# Equal to schedules.names(), which would import numpy; a test compares the two.
ScheduleName = Literal[
    "1f1b", "chimera", "dualpipe-v", "eager-1f1b", "gpipe", "hanayo", "interleaved-1f1b", "interleaved-zb",
    "looped-bfs", "pipedream", "pipedream-2bw", "sequential", "v-half", "v-min", "zb-h1", "zb-h2", "zb-v",
]  # fmt: skip
SCHEDULE_LIST = ", ".join(get_args(ScheduleName))
# Equal to the engines of plan.export; a test compares the two.
Engine = Literal["torch-pipelining", "torchtitan"]
RecomputeMode = Literal["never", "except-last", "always"]


def counts(text: str) -> list[int]:
    """Parse one number of at least 1, or several with commas between them.

    >>> counts("2,4")
    [2, 4]
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r}: give a number of at least 1, or several as in 2,4,8")
    return [int(part) for part in parts]


def count_or_auto(text: str) -> int | Literal["auto"]:
    """Parse a number of at least 1, or ``"auto"``."""
    if text == "auto":
        return "auto"
    if not text.strip().isdecimal() or not int(text):
        raise typer.BadParameter(f"{text!r}: give a number of at least 1, or auto")
    return int(text)


def names(text: str) -> list[str]:
    """Parse names with commas between them."""
    return [name.strip() for name in text.split(",")]


def _json_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" and not is_stream(path):
        raise typer.BadParameter(f"cannot save JSON in {text!r}: its name must end in .json")
    return path


def option(
    metavar: str,
    help_text: str,
    *declarations: str,
    group: str | None = None,
    parser: Callable[[str], Any] | None = None,
    **more: Any,
) -> Any:
    """Declare an option that takes a value.

    Args:
        metavar: stands for the value in ``--help``.
        help_text: its line there.
        declarations: as in ``"--output", "-o"``; by default that of the parameter.
        group: its section in ``--help``.
        parser: makes the value of its text; raises ``typer.BadParameter``.
        more: keywords of ``typer.Option``.
    """
    return typer.Option(
        *declarations,
        parser=parser,
        metavar=metavar,
        help=help_text,
        rich_help_panel=group,
        case_sensitive=False,
        **{"show_default": False, **more},
    )


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", show_default=False, help="path/to/file.py:factory or module:factory."),
]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", show_default=False, help="A saved plan; it may have been edited.")
]
PlanOption = Annotated[
    Path | None, option("FILE", "Run this saved plan; its devices, cut and schedule are fixed.")
]
Devices = Annotated[
    str | None,
    option("N|NAMES", "Number of accelerators, or of virtual CPU devices; or names as in cuda:0,cuda:1."),
]
Cluster = Annotated[
    Path | None,
    option("FILE", "The devices, as `pipepart cluster -o` saves them.", "--cluster", group="Devices"),
]
Described = Annotated[
    list[str] | None,
    option(
        "MEMORY[@SPEED]",
        "A device that is not at hand; repeatable. 24GiB, or 16GiB@0.6 if slower than the one profiled.",
        "--device",
        group="Devices",
    ),
]
Bandwidth = Annotated[
    str | None, option("RATE", "Between devices given by --device: 12GB/s.", group="Devices")
]
Schedule = Annotated[
    Literal[ScheduleName, "auto", "search"] | None,
    option(
        "NAME",
        f"auto for the best of several, search for an order made for these stages, or one of {SCHEDULE_LIST}.",
        show_default=True,
    ),
]
MicroBatches = Annotated[
    Any,
    option(
        "N",
        "Parts of a mini-batch; auto for the best number profiled.",
        parser=count_or_auto,
        show_default=True,
    ),
]
Recompute = Annotated[
    Literal[RecomputeMode, "auto"] | None,
    option(
        "MODE",
        "Activation checkpointing: auto for stages that would not fit; or never, except-last (all micro-batches but "
        "the last) or always, for all stages.",
        show_default=True,
    ),
]
Reduction = Annotated[
    Literal["mean", "sum", "batch"] | None,
    option(
        "NAME",
        "How the loss reduces over samples, if it does not say: mean, sum, or batch for any loss of the whole "
        "mini-batch.",
        group="Schedule",
    ),
]
SearchSeconds = Annotated[
    float | None,
    option(
        "SECONDS",
        "Time to search for; 10 if not given, or part of a second for a small model.",
        min=0.01,
        group="Schedule",
    ),
]
Sample = Annotated[
    str | None,
    option(
        "SHAPE[:DTYPE[:BOUND]]",
        "Make up a sample: 32x3x16x16, or 8x128:int64:50257 for tokens. The first number is the batch size.",
        "--input",
        group="Profiling",
    ),
]
Layers = Annotated[
    Any,
    option(
        "NAME[,NAME..]",
        "Modules to keep whole as layers, in place of the model's blocks; '' for the whole model.",
        group="Profiling",
        parser=names,
    ),
]
Optimizer = Annotated[
    str,
    option(
        "NAME",
        "Optimizer whose state counts as memory: sgd, momentum, adam or adamw.",
        group="Profiling",
        show_default=True,
    ),
]
Threads = Annotated[
    int | None, option("N", "CPU threads per operation while measuring.", min=1, group="Profiling")
]
TimeBudget = Annotated[
    float,
    option(
        "SECONDS",
        "Time to measure each micro-batch size for.",
        min=0,
        show_default=True,
        group="Profiling",
    ),
]
Roofline = Annotated[
    str | None,
    option(
        "TEXT|FILE",
        "Estimate times instead of running the layers, also for a model on the meta device: for a device that reaches "
        "'cuda: 156 TFLOP/s, 1.5 TB/s, 5 us', or one that Roofline.save has saved.",
        group="Profiling",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Output = Annotated[
    Path | None,
    option("FILE.json", "Save the JSON in a file.", "--output", "-o", parser=_json_file),
]


def set_by_user(context: typer.Context, *parameters: str) -> list[str]:
    """Return those of the named parameters that are on the command line, as ``--option``."""
    options = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in parameters and source is not None and source.name == "COMMANDLINE":
            options.append(parameter.opts[0])
    return options
