"""Counts the threads that wait in torch: a script that ends while one does would abort the process.

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
    """Around what a daemon thread waits for in torch."""
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
    """Wait until no thread waits in torch, at most some seconds; return whether none does."""
    with _changed:
        return _changed.wait_for(lambda: not _inside, seconds)
