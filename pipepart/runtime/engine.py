"""Engine: the workers of a pipeline, which execute one run at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue

import torch

from ..planning import Plan
from ..workers.forks import FORKED, listen_for_forks
from ..workers.worker import Job, Worker, start_workers
from .failure.nonfinite import first_not_finite
from .failure.out_of_memory import explained
from .failure.stalled import StepTimeoutError, Watchdog
from .step import Step

_GRACE_SECONDS = 1.0  # for workers to leave a step that timed out


class Engine:
    """One worker per device. The caller's thread starts a run on them, waits, and raises the first failure.

    Args:
        plan: has the devices.
        timeout: a run is given up if no action ends for this many seconds; None for no limit.
    """

    def __init__(self, plan: Plan, timeout: float | None = None) -> None:
        self.closed: str = ""
        self._plan = plan
        self._timeout = timeout
        # Either all workers get a job or none. Reentrant, as a signal handler may close the pipeline meanwhile.
        self._lock = threading.RLock()
        self._handing_out = False
        self._stuck: set[int] = set()  # workers that the engine no longer waits for
        self._names = [device.name for device in plan.workers]
        self.workers: list[Worker] = start_workers(
            [(d.name, torch.device(d.torch_device or "cpu"), d.threads) for d in plan.workers]
        )
        listen_for_forks(self)

    def check_open(self) -> None:
        """Raise if the engine is closed.

        Raises:
            RuntimeError: the engine is closed.
        """
        if self.closed:
            raise RuntimeError(self.closed)

    def execute(self, step: Step, scaled: bool = False) -> None:
        """Run a schedule to its end. ``scaled``: gradients are scaled, so they may overflow.

        Raises:
            RuntimeError: the engine is closed.
            TimeoutError: no action has ended for too long.
            BaseException: the first failure on any device, with its own type and traceback. By then every worker has
            left the run, or the engine is closed.
        """
        self.check_open()
        done: SimpleQueue[None] = SimpleQueue()
        step.begin_guards(scaled)
        try:
            # Layers see the caller's context variables; a context runs on one thread at a time, so each gets a copy.
            jobs = (
                partial(copy_context().run, partial(step.work, number)) for number in range(len(self.workers))
            )
            self._hand_out(jobs, partial(done.put, None))
            if self._timeout is None:
                for _ in self.workers:
                    done.get()
            else:
                Watchdog(self._timeout, step, self.workers, self._names).wait(done)
        except BaseException as interrupt:  # KeyboardInterrupt, in this thread, or the watchdog's
            step.fail(interrupt)
            self._wait_until_idle(
                _GRACE_SECONDS if isinstance(interrupt, StepTimeoutError) else self._timeout
            )
            step.forget()
            raise
        try:
            step.finish()
        except BaseException as error:  # caused by a failed device: the worker's own error says more
            step.fail(error)
        self._raise_failure(step)

    def execute_here(self, step: Step) -> None:
        """Run the backward of all stages on the calling thread.

        Raises:
            RuntimeError: the engine is closed.
            BaseException: the error of the step.
        """
        self.check_open()
        step.begin_guards(scaled=False)
        try:
            step.backward_here()
        except Exception as error:
            step.fail(error)
        self._raise_failure(step)

    def _raise_failure(self, step: Step) -> None:
        if step.guards:
            step.failure = first_not_finite(step.guards, step.sink, step.failure)
        if step.failure is not None:
            failure = explained(step, self._plan)
            step.forget()
            try:
                raise failure
            finally:
                del failure  # break the cycle: traceback, this frame, error, traceback

    def close(self, reason: str) -> None:
        """End the workers. Later runs raise an error with ``reason``. Closing twice does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = reason
            if not self._handing_out:
                self._stop()

    def join(self) -> None:
        """Wait until the workers of a closed engine have ended, except those that are stuck.

        If a worker calls this, as when a layer closes its own pipeline, it does not wait: others may wait for it.
        """
        if threading.get_ident() in {worker.ident for worker in self.workers}:
            return
        for number, worker in enumerate(self.workers):
            if number not in self._stuck:
                worker.join()

    def forked(self) -> None:
        """Close the engine in a forked process, which has no workers."""
        self._lock = threading.RLock()
        self._stuck = set(range(len(self.workers)))
        self.closed = FORKED

    def _hand_out(self, jobs: Iterable[Job], then: Job | None = None) -> None:
        with self._lock:
            self.check_open()
            self._handing_out = True
            try:
                for worker, job in zip(self.workers, jobs, strict=True):
                    worker.submit(job, then)
            finally:
                self._handing_out = False
                if self.closed:  # by the handler of a signal
                    self._stop()

    def _stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def _wait_until_idle(self, seconds: float | None) -> None:
        """Wait until every worker is idle.

        Workers that are still busy after ``seconds``, or at a second interrupt, are given up.
        """
        missing = set(range(len(self.workers)))
        try:
            idle: SimpleQueue[int] = SimpleQueue()
            with self._lock:
                if not self.closed:
                    self._hand_out(partial(idle.put, number) for number in range(len(self.workers)))
            if self.closed:  # by another thread: each worker finishes its jobs and ends
                missing -= {number for number, worker in enumerate(self.workers) if worker.join(seconds)}
            while missing and not self.closed:
                missing.discard(idle.get(timeout=seconds))
        except Empty:
            pass
        except BaseException:
            self._give_up(missing, "a layer did not return after an interrupt")
            raise
        if missing:
            names = " and ".join(self._names[number] for number in sorted(missing))
            self._give_up(missing, f"a layer on {names} did not return when a step was given up")

    def _give_up(self, workers: set[int], reason: str) -> None:
        self._stuck |= workers
        self.close(f"the pipeline is closed: {reason}")
