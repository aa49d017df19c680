"""Saving: a checkpoint written in a background thread. Its error is raised later, never lost."""

from __future__ import annotations

import atexit
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

_unfinished: set[Saving] = set()  # written, or failed and not reported


class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: the directory that it will have.
    """

    def __init__(self, path: Path, owner: object) -> None:
        self.path = path
        self._owner = weakref.ref(owner)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """True if nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def join(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete; return its directory.

        Args:
            timeout: seconds; None to wait without limit.

        Raises:
            TimeoutError: it is not complete by then, and is still being written.
            BaseException: what went wrong; the checkpoint before it is still there.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"{str(self.path)!r} was not complete after {timeout} s")
        _unfinished.discard(self)
        if self._error is not None:
            raise self._error
        return self.path

    def start(self, work: Callable[[], object]) -> None:
        """Run ``work`` on a thread, which the process waits for before it exits."""
        self._thread = threading.Thread(target=self._run, args=([work],), name="pipepart-checkpoint")
        _unfinished.add(self)
        self._thread.start()

    def _run(self, jobs: list[Callable[[], object]]) -> None:
        try:
            jobs.pop()()  # which has copies of all tensors: nothing holds it afterwards
            _unfinished.discard(self)
        except BaseException as error:
            error.add_note(f"while {str(self.path)!r} was written in the background")
            self._error = error


def finish(owner: object) -> None:
    """Wait until all checkpoints of ``owner``, a pipeline or a module, are written.

    Raises:
        BaseException: one has failed. It is raised once.
    """
    for saving in [*_unfinished]:
        if saving._owner() is owner:
            saving.join()


def _report() -> None:
    for saving in [*_unfinished]:
        try:
            saving.join()
        except BaseException:
            traceback.print_exc()


atexit.register(_report)
