"""Exit statuses of commands: 1 if the answer is no, 2 for bad input, 1 and a traceback for any other exception."""

from __future__ import annotations

import errno
import functools
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec

import typer

_Parameters = ParamSpec("_Parameters")
_OUR_PACKAGES = ("pipepart", "schedules")
# Frames between ours and the first one of a user's module, layer or loss.
_IN_BETWEEN = ("importlib", "threading", "contextlib", "concurrent", "torch.nn.modules.module")


class UsageError(typer.BadParameter):
    """Bad input of a command. The message says what is wrong and what to write instead."""

    def format_message(self) -> str:
        """Return the message without a prefix."""
        return self.message


def with_exit_status(command: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Decorate a command to end with status 2 for bad input, and with 1 and a traceback for everything else.

    A model that does not fit is an answer: status 1, with changes that would fit.

    Bad input has a type: :class:`UsageError` of the command line, ``Refused`` of pipepart, ``ScheduleError`` of
    schedules. All other exceptions, of a layer, a loss, the factory or pipepart itself, keep their traceback.
    """

    @functools.wraps(command)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        # At a closed pipe, Typer ends the process without a message.
        except (typer.BadParameter, typer.Exit, BrokenPipeError):
            raise
        except Exception as error:
            _raise_bad_input(error)
            _print_traceback(error)
            raise typer.Exit(1) from None

    return run


def _raise_bad_input(error: Exception) -> None:
    """Raise what ends the command with status 2 if the error is bad input."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        raise UsageError("cannot write the output: no space is left on the device") from None
    from schedules import ScheduleError

    from ..input_error import Refused
    from ..planning import InfeasiblePlanError

    if isinstance(error, InfeasiblePlanError):
        from ..reporting import infeasible_report, show

        show(infeasible_report(error), file=sys.stderr)
        raise typer.Exit(1) from None
    if isinstance(error, Refused | ScheduleError):
        raise UsageError("\n".join([str(error), *getattr(error, "__notes__", ())])) from None


def _print_traceback(error: Exception) -> None:
    """Print the traceback from the user's code on, or all of it if none of the user's code is in it.

    Code of torch is the user's if pipepart has noted which layer called it; else pipepart itself called it.
    """
    own = error.__traceback__
    while own is not None and (_package(own) in _OUR_PACKAGES or _module(own).startswith(_IN_BETWEEN)):
        own = own.tb_next
    in_layer = any(text.startswith("pipepart: in ") for text in getattr(error, "__notes__", ()))
    if own is not None and _package(own) == "torch" and not in_layer:
        own = None
    # A SyntaxError's own message has the place in the user's file.
    if own is not None or isinstance(error, SyntaxError):
        error.__traceback__ = own
    typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)


def _module(entry: TracebackType) -> str:
    return entry.tb_frame.f_globals.get("__name__", "")


def _package(entry: TracebackType) -> str:
    return _module(entry).partition(".")[0]
