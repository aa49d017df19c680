"""Process settings while pipelines run: thread switch interval, and whether freed memory is kept.

Each is set by the first thread that enters it and restored by the last one that leaves.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from abc import ABC, abstractmethod
from typing import Any

# Seconds that a thread keeps the interpreter while others wait for it. With Python's default of 5 ms, another thread
# that runs Python all the time (a progress bar, a data loader) slows a worker eightfold; with this value hardly.
_TURN_SECONDS = 2e-4
_HALF = 5e-7  # half of the unit to which the interpreter rounds down, so that the previous interval is restored exactly

# <malloc.h>
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 32 * 2**20  # glibc always maps larger blocks separately
# Free memory at the end of a heap is returned above the threshold; an empty heap, unless the pad exceeds it.
_KEEP = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 128 * 2**20}
# The value that glibc's dynamic threshold reaches in a process that frees large blocks. It cannot be made dynamic
# again.
_USUAL = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: 2 * _LARGEST, _TOP_PAD: 128 * 2**10}
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


class _Setting(ABC):
    """Sets something of the process while any thread is in its block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._set()

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._restore()

    @abstractmethod
    def _set(self) -> None: ...

    @abstractmethod
    def _restore(self) -> None: ...


class _QuickTurns(_Setting):
    """A short thread switch interval, so that busy threads do not delay the workers."""

    def _set(self) -> None:
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(min(self._before, _TURN_SECONDS) + _HALF)
        self._now = sys.getswitchinterval()

    def _restore(self) -> None:
        if sys.getswitchinterval() == self._now:  # nobody else has set it meanwhile
            sys.setswitchinterval(self._before + _HALF)


class _KeptMemory(_Setting):
    """Makes the C library keep freed memory on the CPU, as the caching allocators of GPUs do.

    Each micro-batch frees its activations, and the next one allocates as much again. glibc returns large blocks to the
    system, which clears every page when it is allocated again. That takes up to 5 % of a step. Other C libraries and
    the user's own malloc settings are not changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._library = _glibc()

    def _set(self) -> None:
        self._tell(_KEEP)

    def _restore(self) -> None:
        self._tell(_USUAL)
        if self._library is not None:
            self._library.malloc_trim(0)

    def _tell(self, values: dict[int, int]) -> None:
        if self._library is not None:
            for parameter, value in values.items():
                self._library.mallopt(parameter, value)


def _glibc() -> Any:
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OWN_SETTINGS):
        return None
    return ctypes.CDLL(None)


quick_turns = _QuickTurns()
kept_memory = _KeptMemory()


def others_run() -> bool:
    """Return True if there are threads besides this package's and the calling one, which waits for the workers.

    Beside them the workers need quick turns. Among themselves workers hand over at each operation of torch anyway, and
    quick turns would only cost time.
    """
    waiting = threading.current_thread()
    return any(
        thread is not waiting and not thread.name.startswith("pipepart-") for thread in threading.enumerate()
    )
