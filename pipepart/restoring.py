"""restoring: calls a function and then restores what it may have changed, whatever ends it, an interrupt included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def restoring(run: Callable[[], R], restore: Callable[[], object]) -> R:
    """Call ``run``, then ``restore``; return the result of ``run``.

    An interrupt (Ctrl-C) is raised at any call, so one may come while ``restore`` runs: that is called again then. A
    context manager made of a generator would not do: an interrupt on the way out of its first half skips the second,
    until the traceback is freed.

    Args:
        run: prepares and does the work.
        restore: may be called twice, and before ``run`` has done anything.
    """
    try:
        return run()
    finally:
        try:
            restore()
        except KeyboardInterrupt:
            restore()
            raise
