"""Runs what waits in torch on threads of its own, and lets a script end only after these: else the process would abort.

Python ends a daemon thread when it comes back for the lock, and C++ code above it does not expect that ("terminate
called without an active exception").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

Done = SimpleQueue[BaseException | None]  # gets None at the end of what is waited for, or why it failed

_changed = threading.Condition()
_inside = 0


@contextmanager
def waits_in_torch() -> Iterator[None]:
    """Context manager around a wait of a daemon thread in torch."""
    global _inside
    with _changed:
        _inside += 1
    try:
        yield
    finally:
        with _changed:
            _inside -= 1
            _changed.notify_all()


def all_have_left(seconds: float) -> bool:
    """Wait, for a limited time, until no thread waits in torch; return True if none does."""
    with _changed:
        return _changed.wait_for(lambda: not _inside, seconds)


def begin(work: Callable[[], Any], done: Done) -> threading.Thread:
    """Run ``work`` on a new thread, so that the caller can stop waiting for it.

    At its end, ``done`` gets None, or the error if it failed.
    """

    def run() -> None:
        with waits_in_torch():
            try:
                work()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

    thread = threading.Thread(target=run, name="pipepart-collective", daemon=True)
    thread.start()
    return thread
