"""Prints the result of a command as tables or JSON, and writes files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType


def deliver(
    result: str, reports: Callable[[], Sequence[RenderableType]], *, as_json: bool, path: Path | None
) -> None:
    """Save the result, and print it as JSON or as tables.

    Args:
        result: as JSON.
        reports: makes the tables, if they are printed.
        as_json: print ``result`` instead.
        path: also save ``result`` there.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is not None:
        write_text(path, result + "\n")
    if as_json:
        typer.echo(result)
    else:
        from ..reporting import show

        show(*reports())


def write_text(path: Path, text: str) -> None:
    """Write a file, and say so on standard error.

    Raises:
        UsageError: the file cannot be written.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, and say so on standard error.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    typer.echo(f"Saved in {path}.", err=True)


def check_writable(*paths: Path | None) -> None:
    """Check that results can be saved, before anything is measured.

    Raises:
        UsageError: a path is a directory, or its directory does not exist.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise UsageError(f"cannot write {str(path)!r}: it is a directory")
        if not path.absolute().parent.is_dir():
            raise UsageError(
                f"cannot write {str(path)!r}: there is no directory {str(path.absolute().parent)!r}"
            )


def user_output_to_stderr() -> redirect_stdout:
    """Redirect prints of the user's code to standard error within a block; standard output is for the result."""
    return redirect_stdout(sys.stderr)


def note(text: str) -> None:
    """Print a remark on standard error."""
    typer.echo(f"Note: {text}", err=True)
