"""The engine: workers that live as long as the pipeline, and one run at a time."""

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
from .failure.nonfinite import NanGuard
from .failure.out_of_memory import explained
from .failure.stalled import StepTimeoutError, Watchdog
from .step import Step

_GRACE_SECONDS = 1.0  # for workers to come out of a step that took too long


class Engine:
    """One worker a device. The caller's thread hands out a run, waits, and raises what failed.

    Args:
        plan: has the devices.
        timeout: seconds in which no action ends, after which a run is given up; None for any number.
        guard: looks at what each run has made.
    """

    def __init__(self, plan: Plan, timeout: float | None = None, guard: NanGuard | None = None) -> None:
        self.closed: str = ""
        self._plan = plan
        self._timeout = timeout
        self._guard = guard
        # All workers get a job or none does. Reentrant, as a signal's handler may close the pipeline meanwhile.
        self._lock = threading.RLock()
        self._handing_out = False
        self._stuck: set[int] = set()  # workers that are not waited for any more
        self._names = [device.name for device in plan.workers]
        self.workers: list[Worker] = start_workers(
            [(d.name, torch.device(d.torch_device or "cpu"), d.threads) for d in plan.workers]
        )
        listen_for_forks(self)

    def check_open(self) -> None:
        """Refuses what comes too late.

        Raises:
            RuntimeError: the engine is closed.
        """
        if self.closed:
            raise RuntimeError(self.closed)

    def execute(self, step: Step, scaled: bool = False) -> None:
        """Runs a schedule to its end; ``scaled`` where gradients may well overflow.

        Raises:
            RuntimeError: the engine is closed.
            TimeoutError: no action has ended for too long.
            BaseException: the first failure on any device, with its own type and traceback. No worker is in the
                run any more when it arrives, or the engine is closed.
        """
        self.check_open()
        done: SimpleQueue[None] = SimpleQueue()
        if self._guard is not None:
            self._guard.begin(step.schedule, scaled)
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
        except BaseException as error:  # as of a device that has failed: what a worker has met says more
            step.fail(error)
        self._raise_failure(step)

    def execute_here(self, step: Step) -> None:
        """Goes backward through all stages on the calling thread.

        Raises:
            RuntimeError: the engine is closed.
            BaseException: what fails.
        """
        self.check_open()
        if self._guard is not None:
            self._guard.begin(step.schedule, scaled=False)
        try:
            step.backward_here()
        except Exception as error:
            step.fail(error)
        self._raise_failure(step)

    def _raise_failure(self, step: Step) -> None:
        if self._guard is not None:
            step.failure = self._guard.verdict(step.sink, step.failure)
        if step.failure is not None:
            failure = explained(step, self._plan)
            step.forget()
            try:
                raise failure
            finally:
                del (
                    failure
                )  # else the traceback holds this frame, the frame the error, the error the traceback

    def close(self, reason: str) -> None:
        """Ends the workers; every later run is refused for ``reason``. Closing twice does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = reason
            if not self._handing_out:
                self._stop()

    def join(self) -> None:
        """Waits for the ends of the workers of a closed engine, those that are stuck apart.

        A worker does not wait, as where a layer closes its own pipeline: others may wait for it.
        """
        if threading.get_ident() in {worker.ident for worker in self.workers}:
            return
        for number, worker in enumerate(self.workers):
            if number not in self._stuck:
                worker.join()

    def forked(self) -> None:
        """In a forked process there are no workers."""
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
        """Waits until every worker is done with what it was given, or gives up those that are not.

        It does so when ``seconds`` have gone by, or at a second interrupt.
        """
        missing = set(range(len(self.workers)))
        try:
            idle: SimpleQueue[int] = SimpleQueue()
            with self._lock:
                if not self.closed:
                    self._hand_out(partial(idle.put, number) for number in range(len(self.workers)))
            if self.closed:  # by another thread: its jobs done, each worker ends
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
