"""Arguments and options that more than one command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", show_default=False, help="As path/to/file.py:factory.")
]
Sample = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="SHAPE[:DTYPE[:BOUND]]",
        show_default=False,
        help="Make up a sample, as in 32x3x16x16, or 8x128:int64:50257 for tokens; the first number is the batch.",
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Whose state to count: sgd, momentum, adam (what is taken if none is named) or adamw.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, show_default=False, help="Threads of each operation while measuring on a CPU."
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="S", min=0, show_default=False, help="Time to measure each size for; 1 if not given."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Save the JSON in FILE."),
]
