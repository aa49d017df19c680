"""The engine: workers that live as long as the pipeline, and one run at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

import torch

from ..worker import Worker, start_workers
from .run import Run


class Engine:
    """One worker a device. The caller's thread hands out a run, waits, and raises what failed.

    Args:
        devices: name, torch device and intra-operation threads of each.
    """

    def __init__(self, devices: Sequence[tuple[str, torch.device, int | None]]) -> None:
        self.workers: list[Worker] = start_workers(devices)
        self.closed: str = ""

    def execute(self, run: Run) -> None:
        """Runs a schedule to its end.

        Raises:
            RuntimeError: the engine is closed.
            BaseException: the first failure on any device, with its own type and traceback; no worker is in the
                run any more when it arrives.
        """
        if self.closed:
            raise RuntimeError(self.closed)
        done: SimpleQueue[None] = SimpleQueue()
        try:
            for device, worker in enumerate(self.workers):
                worker.submit(partial(run.work, device, done))
            for _ in self.workers:
                done.get()
        except BaseException as interrupt:  # KeyboardInterrupt, in this thread
            run.fail(interrupt)
            self._wait_until_idle()
            run.forget()
            raise
        run.finish()
        if run.failure is not None:
            failure = run.failure
            run.forget()
            try:
                raise failure
            finally:
                del (
                    failure
                )  # else the traceback holds this frame, the frame the error, the error the traceback

    def close(self, reason: str) -> None:
        """Ends the workers; every later run is refused for ``reason``. Closing twice does nothing."""
        if not self.closed:
            self.closed = reason
            for worker in self.workers:
                worker.stop()

    def _wait_until_idle(self) -> None:
        """Waits until every worker is done with what it was given; a second interrupt gives them up."""
        idle: SimpleQueue[None] = SimpleQueue()
        try:
            for worker in self.workers:
                worker.submit(partial(idle.put, None))
            for _ in self.workers:
                idle.get()
        except BaseException:
            self.close("the pipeline is closed: a layer did not return after an interrupt")
            raise
