"""Makes the C library keep freed memory during runs on the CPU, as the caching allocators of GPUs do.

Each micro-batch frees its activations, and the next one allocates as much again. glibc returns large blocks to the
system, which clears every page when it is allocated again. That takes up to 5 % of a step. Other C libraries and the
user's own malloc settings are not changed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from typing import Any

# <malloc.h>
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 32 * 2**20  # glibc always maps larger blocks separately
# Free memory at the end of a heap is returned above the threshold; an empty heap, unless the pad exceeds it.
_KEEP = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 128 * 2**20}
# The value that glibc's dynamic threshold reaches in a process that frees large blocks. It cannot be made dynamic
# again.
_USUAL = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: 2 * _LARGEST, _TOP_PAD: 128 * 2**10}
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


class _KeptMemory:
    """Keeps freed memory in the process while any block is entered, and returns it after the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._library = _glibc()

    def __enter__(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                self._set(_KEEP)

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0 and self._library is not None:
                self._set(_USUAL)
                self._library.malloc_trim(0)

    def _set(self, values: dict[int, int]) -> None:
        if self._library is not None:
            for parameter, value in values.items():
                self._library.mallopt(parameter, value)


def _glibc() -> Any:
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OWN_SETTINGS):
        return None
    return ctypes.CDLL(None)


kept_memory = _KeptMemory()
