"""ControlThread: runs the collectives of a pipeline's ranks, so that the calling thread can stop waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from .leaving import waits_in_torch

Done = SimpleQueue[BaseException | None]  # gets None at the end of what is waited for, or why it failed

_LEAVE_SECONDS = 1.0  # for a collective whose connections are broken to end


class ControlThread:
    """Runs collectives one after another on its own thread, while the calling thread waits interruptibly."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), daemon=True)
        self._thread.start()

    def begin(self, collective: Callable[[], Any], done: Done) -> None:
        """Run a collective. At its end, ``done`` gets None, or the error if it failed."""

        def run() -> None:
            try:
                collective()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)
            finally:
                self._idle.set()

        self._idle.clear()
        self._jobs.put(run)

    def leave(self) -> None:
        """Wait a little for a collective that has failed: a script that ends while gloo still waits would abort."""
        self._idle.wait(_LEAVE_SECONDS)

    def end(self, last: Callable[[], None] | None = None) -> None:
        """End the thread after all queued work and, if given, ``last``."""
        if last is not None:
            self._jobs.put(last)
        self._jobs.put(None)

    def join(self) -> None:
        """Wait a little for the end of the thread. Does nothing on the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_SECONDS)


def _run(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        with waits_in_torch():
            job()
        del job  # so that the thread keeps no pipeline alive
