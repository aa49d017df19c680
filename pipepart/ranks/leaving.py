"""Counts the threads that wait in torch, to end the script only after them: else the process would abort.

Python ends such a thread when it comes back for the lock, and C++ code above it does not expect that ("terminate called
without an active exception").
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
