"""Prints the result of a command as tables or JSON, and writes files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..whole_file import write_whole
from .errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..document import Document


def deliver(
    result: Document, reports: Callable[[], Sequence[RenderableType]], *, as_json: bool, path: Path | None
) -> None:
    """Save the result as JSON, and print it as JSON or as tables.

    Args:
        result: of the command.
        reports: makes the tables, if they are printed.
        as_json: print JSON instead.
        path: also save the JSON there.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is not None:
        save(result.save, path)
    if as_json:
        typer.echo(result.model_dump_json(indent=1))
    else:
        from ..reporting import show

        show(*reports())


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically, and print its path on standard error.

    Raises:
        UsageError: the file cannot be written.
    """
    save(lambda place: write_whole(place, content), path)


def save(write: Callable[[Path], None], path: Path) -> None:
    """Call a function that writes a file, and print the file's path on standard error.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        write(path)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    typer.echo(f"Saved in {path}.", err=True)


def check_writable(*paths: Path | None) -> None:
    """Check that results can be saved, before anything is measured.

    Raises:
        UsageError: a path is a directory, its directory does not exist, or it may not be written.
    """
    for path in filter(None, paths):
        parent = path.absolute().parent
        if path.is_dir():
            raise UsageError(f"cannot write {str(path)!r}: it is a directory")
        if not parent.is_dir():
            raise UsageError(f"cannot write {str(path)!r}: there is no directory {str(parent)!r}")
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise UsageError(f"cannot write {str(path)!r}: permission denied")


def user_output_to_stderr() -> redirect_stdout:
    """Redirect prints of the user's code to standard error within the block; standard output is for the result."""
    return redirect_stdout(sys.stderr)


def note(text: str) -> None:
    """Print a remark on standard error."""
    typer.echo(f"Note: {text}", err=True)
