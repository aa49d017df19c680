"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import parsers

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", show_default=False, help="path/to/file.py:factory or module:factory."),
]
Sample = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="SHAPE[:DTYPE[:BOUND]]",
        show_default=False,
        help="Make up a sample: 32x3x16x16, or 8x128:int64:50257 for tokens. The first number is the batch size.",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="N|NAMES",
        show_default=False,
        help="Number of accelerators, or of virtual CPU devices; or torch devices as in cuda:0,cuda:1.",
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(metavar="NAME", help="Whose state memory figures include: sgd, momentum, adam or adamw."),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default=False, help="CPU threads per operation while measuring."),
]
TimeBudget = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="Time to measure each micro-batch size for.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Save the JSON in FILE."),
]
# Constraints on the cut. The parsers make them pairs and lists, which Typer has no annotation for.
Pin = Annotated[
    list[Any] | None,
    typer.Option(
        parser=parsers.pin,
        metavar="LAYER=STAGE",
        show_default=False,
        help="The stage of a layer; repeatable. Stages count from 0.",
    ),
]
Colocate = Annotated[
    list[Any] | None,
    typer.Option(
        parser=parsers.layer_group,
        metavar="LAYER,LAYER[,..]",
        show_default=False,
        help="Layers that must share a stage; repeatable.",
    ),
]
NoCutBefore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYER", show_default=False, help="A layer that must not start a stage; repeatable."
    ),
]
CutBefore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYER",
        show_default=False,
        help="A layer that starts a stage. Given once per stage but the first, this is the whole cut.",
    ),
]


def given(context: typer.Context, *names: str) -> list[str]:
    """Return those of the named options that stand on the command line, as ``--option``."""
    sources = {name: context.get_parameter_source(name) for name in names}
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    return [
        flags[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    ]
