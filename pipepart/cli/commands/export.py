"""``pipepart export``: write a saved plan in the files of another pipeline engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..errors import UsageError, with_exit_status
from ..options import option


@with_exit_status
def export_command(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", show_default=False, help="A saved plan; it may have been edited."),
    ],
    to: Annotated[
        Any,
        option(
            "NAME",
            f"The engine: {', '.join(options.ENGINES)}.",
            words=options.ENGINES,
        ),
    ],
    output: Annotated[
        Path | None,
        option(
            "DIR",
            "Save the files in DIR, which is made if need be.",
            names=("--output", "-o"),
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a plan in the files of another engine; print them without -o.

    A plan that the engine cannot run is refused, with what to plan instead. Comments in the files name the devices of
    the ranks.
    """
    from ...planning import Plan
    from ..files import read
    from ..results import ExportResult

    exported = read(Plan, plan).export(to)
    if output is not None:
        try:
            paths = exported.save(output)
        except OSError as error:
            raise UsageError(f"cannot write into {str(output)!r}: {error.strerror or error}") from None
        for path in paths:
            typer.echo(f"Saved in {path}.", err=True)
    if as_json:
        found = ExportResult(engine=exported.engine, files=dict(exported.files))
        typer.echo(found.model_dump_json(indent=1))
    elif output is None:
        typer.echo(str(exported), nl=False)
