"""Lets a worker that is ready take the interpreter soon from a thread that runs Python all the time."""

from __future__ import annotations

import sys
import threading

# A thread keeps the interpreter for as long as this if others ask for it. A progress bar or a loader that spins slows a
# worker eightfold by Python's own 5 ms, and hardly by this; where nobody spins it costs nothing that could be measured.
_SECONDS = 2e-4
_HALF = 5e-7  # of the unit to which the interpreter rounds down: what it says is put back as it says it


class _QuickTurns:
    """While any pipeline is in a run, the interpreter's switch interval is short; then it is as it was."""

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
            if self._runs == 0 and sys.getswitchinterval() == self._set:  # else somebody has set it meanwhile
                sys.setswitchinterval(self._before + _HALF)


quick_turns = _QuickTurns()
