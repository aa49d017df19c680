"""Where a command's result goes: tables or JSON on standard output, JSON in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..document import Document
from .errors import Mistake

if TYPE_CHECKING:
    from rich.console import RenderableType


@contextmanager
def quiet_output() -> Iterator[None]:
    """What the user's code prints goes to standard error: standard output is for the result."""
    with redirect_stdout(sys.stderr):
        yield


def check_writable(path: Path | None) -> None:
    """Finds out before anything is measured whether a result can be saved there.

    Raises:
        Mistake: the directory does not exist, or ``path`` is one.
    """
    if path is None:
        return
    if path.is_dir():
        raise Mistake(f"cannot write {str(path)!r}: it is a directory")
    if not path.absolute().parent.is_dir():
        raise Mistake(f"cannot write {str(path)!r}: there is no directory {str(path.absolute().parent)!r}")


def deliver(
    result: Document, reports: Callable[[], Sequence[RenderableType]], *, as_json: bool, path: Path | None
) -> None:
    """Saves the result, and prints it as JSON or as tables.

    Raises:
        Mistake: the file cannot be written.
    """
    if path is not None:
        with _writing(path):
            result.save(path)
    if as_json:
        typer.echo(result.model_dump_json(indent=1))
    else:
        from ..reporting import show

        show(*reports())
    if path is not None:
        typer.echo(f"Saved in {path}.", err=True)


def write_text(path: Path, text: str) -> None:
    """Saves something beside the result.

    Raises:
        Mistake: the file cannot be written.
    """
    with _writing(path):
        path.write_text(text, encoding="utf-8")
    typer.echo(f"Saved in {path}.", err=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Mistake(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def note(text: str) -> None:
    """A remark beside the result."""
    typer.echo(f"Note: {text}", err=True)
