"""Shortens Python's thread switch interval during a run, so that busy threads do not delay the workers."""

from __future__ import annotations

import sys
import threading

# Seconds that a thread keeps the interpreter while others wait for it. With Python's default of 5 ms, another thread
# that runs Python all the time (a progress bar, a data loader) slows a worker eightfold; with this value hardly.
_SECONDS = 2e-4
_HALF = 5e-7  # half of the unit to which the interpreter rounds down, so that the previous interval is restored exactly


class _QuickTurns:
    """Sets a short switch interval while any pipeline runs, and restores the previous one afterwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._before = self._set = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._runs == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SECONDS) + _HALF)
                self._set = sys.getswitchinterval()
            self._runs += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._runs -= 1
            # Another value means that somebody else has set it meanwhile.
            if self._runs == 0 and sys.getswitchinterval() == self._set:
                sys.setswitchinterval(self._before + _HALF)


quick_turns = _QuickTurns()
