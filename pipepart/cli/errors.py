"""Exit statuses of the commands: 2 for input that cannot be used, 1 if the answer is no or for any other exception."""

from __future__ import annotations

import errno
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from ..input_error import Refused


class UsageError(typer.BadParameter):
    """Bad input of a command. The message says what is wrong and what to write instead."""

    def format_message(self) -> str:
        """Return the message without a prefix."""
        return self.message


class Commands(TyperGroup):
    """The commands of the application. Ends with status 2 and one message for input that cannot be used.

    Bad input has a type: :class:`UsageError` of the command line, ``Refused`` of pipepart, ``ScheduleError`` of
    schedules. A model that does not fit is an answer: status 1, with changes that would fit. All other exceptions, of a
    layer, a loss, the factory or pipepart itself, keep their traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command of a command line."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UsageError("cannot write the output: no space is left on the device") from None
        except ValueError as error:
            from schedules import ScheduleError

            from ..planning import InfeasiblePlanError

            if isinstance(error, InfeasiblePlanError):
                from ..reporting import infeasible_report, show

                show(infeasible_report(error), file=sys.stderr)
                raise typer.Exit(1) from None
            if not isinstance(error, Refused | ScheduleError):
                raise
            raise UsageError(_text(error)) from None
        except Refused as error:
            raise UsageError(_text(error)) from None


def _text(error: Exception) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
