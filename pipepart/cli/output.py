"""Prints the result of a command as tables or JSON, and saves JSON files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..document import Document


@contextmanager
def user_output_to_stderr() -> Iterator[None]:
    """Redirect prints of the user's code to standard error; standard output is for the result."""
    with redirect_stdout(sys.stderr):
        yield


def deliver(
    result: Document, reports: Callable[[], Sequence[RenderableType]], *, as_json: bool, path: Path | None
) -> None:
    """Save the result, and print it as JSON or as tables.

    Raises:
        UsageError: the file cannot be written.
    """
    if path is not None:
        write_text(path, result.model_dump_json(indent=1) + "\n", announce=False)
    if as_json:
        typer.echo(result.model_dump_json(indent=1))
    else:
        from ..reporting import show

        show(*reports())
    if path is not None:
        typer.echo(f"Saved in {path}.", err=True)


def write_text(path: Path, text: str, *, announce: bool = True) -> None:
    """Save a text.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    if announce:
        typer.echo(f"Saved in {path}.", err=True)


def note(text: str) -> None:
    """Print a remark on standard error."""
    typer.echo(f"Note: {text}", err=True)
