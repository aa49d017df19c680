"""``pipepart export``: write a saved plan in the files of another pipeline engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from .. import options
from ..errors import UsageError
from ..options import option


def export_command(
    plan: options.PlanFile,
    to: Annotated[options.Engine, option("NAME", f"The engine: {', '.join(get_args(options.Engine))}.")],
    output: Annotated[
        Path | None,
        option("DIR", "Save the files in DIR, which is made if need be.", "--output", "-o"),
    ] = None,
) -> None:
    """Write a plan in the files of another engine; print them without -o.

    A plan that the engine cannot run is refused, with what to plan instead. Comments in the files name the devices of
    the ranks.
    """
    from ...planning import Plan
    from ..files import read

    exported = read(Plan, plan).export(to)
    if output is None:
        typer.echo(str(exported), nl=False)
        return
    try:
        paths = exported.save(output)
    except OSError as error:
        raise UsageError(f"cannot write into {str(output)!r}: {error.strerror or error}") from None
    for path in paths:
        typer.echo(f"Saved in {path}.", err=True)
