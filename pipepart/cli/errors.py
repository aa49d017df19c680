"""What the command line does with an exception: a line for a mistake in its use, a traceback for user code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import typer

from ..planning import DoesNotFit

_OUR_PACKAGES = {"pipepart", "schedules"}
# What stands between our frames and the first one of a user's module, layer or loss.
_ON_THE_WAY = ("importlib", "threading", "contextlib", "torch.nn.modules.module")


class Mistake(Exception):
    """What the command was given cannot be used; the message says what was wrong and what to do."""


@contextmanager
def mistakes_told() -> Iterator[None]:
    """Ends the command with status 2 and a few lines on a mistake, with status 1 and a traceback on a failure.

    A ValueError or TypeError that pipepart raises is about what it was given. One that comes from further in, from
    a layer, a loss or the factory, is the user's to debug.
    """
    try:
        yield
    except Mistake as mistake:
        _end(str(mistake))
    except DoesNotFit as misfit:
        _end_with_ways_out(misfit)
    except (ValueError, TypeError) as error:
        if not _raised_by_us(error):
            _end_with_traceback(error)
        _end("\n".join([str(error), *_notes(error)]))
    except BrokenPipeError:
        _end_unread()
    except Exception as error:
        _end_with_traceback(error)


def _end(message: str) -> None:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2) from None


def _end_unread() -> None:
    """Who reads the output has had enough, as `head` does."""
    with suppress(OSError, ValueError):  # What is buffered has nowhere to go when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(1) from None


def _end_with_ways_out(misfit: DoesNotFit) -> None:
    from ..reporting import misfit_report, show

    show(misfit_report(misfit, "Error: "), file=sys.stderr)
    raise typer.Exit(2) from None


def _end_with_traceback(error: Exception) -> None:
    error.__traceback__ = _without_our_entrance(error)
    typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    raise typer.Exit(1) from None


def _raised_by_us(error: Exception) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and _is_ours(frames[-1].f_globals.get("__name__", ""))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _OUR_PACKAGES


def _without_our_entrance(error: Exception) -> TracebackType | None:
    """The traceback from the user's code on, or all of it where there is none in it."""
    rest = error.__traceback__
    while rest is not None:
        module = rest.tb_frame.f_globals.get("__name__", "")
        if not _is_ours(module) and not module.startswith(_ON_THE_WAY):
            return rest
        rest = rest.tb_next
    # The place in the user's file is part of a SyntaxError's own message.
    return None if isinstance(error, SyntaxError) else error.__traceback__


def _notes(error: Exception) -> list[str]:
    return list(getattr(error, "__notes__", ()))
