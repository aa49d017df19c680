"""Exit statuses of commands: 2 and a message for bad input, 1 and a traceback for any other exception."""

from __future__ import annotations

import dis
import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..planning import InfeasiblePlanError

_OUR_PACKAGES = {"pipepart", "schedules"}
# Frames between ours and the first one of a user's module, layer or loss.
_IN_BETWEEN = ("importlib", "threading", "contextlib", "torch.nn.modules.module")


class UsageError(typer.BadParameter):
    """Bad input of a command. The message says what is wrong and what to write instead."""

    def format_message(self) -> str:
        """The message, without a prefix."""
        return self.message


@contextmanager
def user_errors() -> Iterator[None]:
    """End the command with status 2 for bad input, and with status 1 and a traceback for everything else.

    Bad input is a :class:`UsageError`, a model that does not fit, or a ValueError or TypeError that a ``raise`` of
    pipepart made. Exceptions from further in (a layer, a loss, the factory) and our own bugs keep their traceback.
    """
    try:
        yield
    except (typer.TyperException, typer.Exit, BrokenPipeError):
        raise
    except (ValueError, TypeError) as error:
        from ..planning import InfeasiblePlanError

        if isinstance(error, InfeasiblePlanError):
            _exit_infeasible(error)
        if not _raised_by_us(error):
            _exit_with_traceback(error)
        raise UsageError("\n".join([str(error), *getattr(error, "__notes__", ())])) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            _exit_with_traceback(error)
        raise UsageError("cannot write the output: no space is left on the device") from None
    except Exception as error:
        _exit_with_traceback(error)


def _exit_infeasible(error: InfeasiblePlanError) -> None:
    from ..reporting import infeasible_report, show

    show(infeasible_report(error, "Error: "), file=sys.stderr)
    raise typer.Exit(2) from None


def _exit_with_traceback(error: Exception) -> None:
    error.__traceback__ = _from_user_code(error)
    typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    raise typer.Exit(1) from None


def _raised_by_us(error: Exception) -> bool:
    """Return True if a ``raise`` statement of pipepart raised the exception, and not a call that failed there."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not _is_ours(last.tb_frame.f_globals.get("__name__", "")):
        return False
    instruction = last.tb_frame.f_code.co_code[last.tb_lasti]
    return dis.opname[instruction] == "RAISE_VARARGS"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _OUR_PACKAGES


def _from_user_code(error: Exception) -> TracebackType | None:
    """The traceback from the user's code on, or all of it if none of the user's code is in it."""
    rest = error.__traceback__
    while rest is not None:
        module = rest.tb_frame.f_globals.get("__name__", "")
        if not _is_ours(module) and not module.startswith(_IN_BETWEEN):
            return rest
        rest = rest.tb_next
    # A SyntaxError's own message has the place in the user's file.
    return None if isinstance(error, SyntaxError) else error.__traceback__
