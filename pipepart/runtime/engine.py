"""Engine: the workers of a pipeline, which run one step at a time.

::

    lives as long as the pipeline       lives for one step                      used by
    Engine, claimed by one thread  ───▶ Step: order, mailboxes, failure         the caller, then all workers
    Worker, one per device         ───▶ Step.work: the actions of the device    its own thread
    Stage: layers and devices      ───▶ StageRun: micro-batches in flight       the worker of its device

Nothing is locked in between: the caller makes the step before the workers have it, and reads it after the last one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from ..autograd.own_copy import tensors
from ..forks import FORKED, listen_for_forks
from ..planning import Plan
from ..ranks.failure import serialize_exception
from ..workers.process_settings import others_run, quick_turns
from ..workers.streams import hold_for_caller
from ..workers.worker import Job, Worker, start_workers
from .actions import Emulation
from .failure.out_of_memory import explained
from .failure.stalled import StepTimeoutError, doing, wait_for
from .observe.recorder import Recorder
from .offload import copy_queues
from .order import Order, Orders
from .sinks import LossSink, OutputSink
from .stage import Stage
from .step import Step
from .transport.compress import compressed_links
from .transport.cuda import Streams
from .transport.links import Links
from .transport.pinned import PinnedCopies
from .transport.skips import Routes

_BUSY = "the pipeline is busy: another thread, or a layer inside it, is in a step"
_NESTED = (
    "the pipeline is busy: another thread is in a backward. It may be one of torch, which takes a further thread where "
    "many hundred backwards begin within each other: go backward from fewer outputs at a time"
)
R = TypeVar("R")

_GRACE_SECONDS = 1.0  # for workers to leave a step that timed out, or that another rank has failed in


class Engine:
    """One worker per device. The caller's thread starts a step on them, waits, and raises the first failure.

    Args:
        plan: has the devices.
        stages: all stages of the plan's schedule.
        orders: the orders of actions.
        emulation: of virtual devices, if they are emulated.
        timeout: a step is given up if no action ends for this many seconds; None for no limit.
        links: to other ranks, if the workers are those of several; the engine has its own rank's only.

    Attributes:
        pinned: copies from the caller's pinned memory.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        orders: Orders,
        emulation: Emulation | None = None,
        timeout: float | None = None,
        links: Links | None = None,
    ) -> None:
        self._closed = ""
        self._plan = plan
        self._stages = stages
        self._orders = orders
        self._emulation = emulation
        self._timeout = timeout
        self._claim_lock = threading.Lock()
        self._claim: _Claim | None = None
        # Either all workers get a job or none. Reentrant, as a signal handler may close the pipeline meanwhile.
        self._lock = threading.RLock()
        self._handing_out = False
        self._stuck: set[int] = set()  # workers that the engine no longer waits for
        self._links = links
        self._rows = range(len(plan.workers)) if links is None else links.local  # of the schedule
        self._names = [device.name for device in plan.workers]
        self._homes = homes = [torch.device(device.torch_device or "cpu") for device in plan.workers]
        self._streams = Streams.of(homes, self._rows)
        self.pinned = PinnedCopies(homes, self._rows)
        self._routes = Routes(plan)
        self._compressed = compressed_links(plan)
        self._copy_queues = copy_queues(plan, self._streams)
        if emulation is not None:
            self._copy_queues = [emulation.copy_queue(*pair) for pair in enumerate(self._copy_queues)]
        places = [(self._names[row], homes[row], plan.workers[row].threads) for row in self._rows]
        # Last of what can fail: it starts the threads.
        self.workers: list[Worker] = start_workers(places)
        listen_for_forks(self)
        weakref.finalize(self, _stop, self.workers).atexit = False

    @property
    def devices(self) -> list[torch.device]:
        """The devices of all workers of this process."""
        return list(dict.fromkeys(self._homes[row] for row in self._rows))

    @property
    def closed(self) -> str:
        """Why no step can run any more; "" if one can."""
        if self._closed or self._links is None or self._links.ranks.failure is None:
            return self._closed
        return f"the pipeline is closed: {self._links.ranks.failure}"

    def check_open(self) -> None:
        """Raise if the engine is closed.

        Raises:
            RuntimeError: the engine is closed, or another rank has failed.
        """
        if self._closed:
            raise RuntimeError(self._closed)
        if self._links is not None:
            self._links.ranks.check()

    def check_free(self) -> None:
        """Check that the engine is open and no other thread runs a step, before other ranks are asked to join one.

        Raises:
            RuntimeError: it is not.
        """
        self.check_open()
        if (claim := self._claim) is not None and claim.thread != threading.get_ident():
            raise RuntimeError(_BUSY)

    def exclusively(self, run: Callable[[], R], is_backward: bool = False) -> R:
        """Call a function while the calling thread has exclusive use of the stages.

        A plain function, because an interrupt between the two halves of a context manager would leave the claim.

        Args:
            run: the function.
            is_backward: whether it runs a backward on this thread, which may begin within another one: while a thread
                of autograd waits for the thread of another device, it goes on with whatever else is ready.

        Raises:
            RuntimeError: the engine is closed, or another thread has them.
        """
        self.check_open()
        claim = _Claim(threading.get_ident(), is_backward)
        try:  # before the claim: an interrupt may come between any two instructions
            with self._claim_lock:
                self._claim = held = self._claim or claim
            if held is not claim and not (is_backward and held == claim):
                raise RuntimeError(_NESTED if is_backward and held.is_backward else _BUSY)
            return run()
        except BaseException as error:
            if self._links is not None and self._links.ranks.midway:  # the others would wait for this rank
                self._leave_ranks(error)
            raise
        finally:
            if self._claim is claim:
                try:
                    self.pinned.wait()
                finally:  # calls nothing: an interrupt is raised in calls
                    self._claim = None

    def new_step(
        self,
        order: Order,
        inputs: Sequence[Any],
        sink: LossSink,
        forward: Step | None = None,
        recorder: Recorder | None = None,
        optimizers: Sequence[Optimizer | None] = (),
        form: Hashable = None,
        seed: int | None = None,
    ) -> Step:
        """Create a step of these actions, which is executed later.

        Between ranks, steps of equal ``form`` exchange equal messages, and ``seed`` is that of the random numbers.
        """
        return Step(
            order,
            self._stages,
            self.pinned.inputs(order.schedule, inputs),
            sink,
            forward=forward,
            optimizers=optimizers,
            recorder=recorder,
            streams=self._streams,
            emulation=self._emulation,
            routes=self._routes,
            compressed=self._compressed,
            copy_queues=self._copy_queues,
            links=self._links,
            table=self._links and self._links.table(form),
            seed=seed,
        )

    def forwards(
        self, inputs: Sequence[Any], sink: LossSink, form: Hashable = None, seed: int | None = None
    ) -> Step:
        """Run all forwards of a mini-batch."""
        order = self._orders.forwards(len(inputs))
        step = self.new_step(order, inputs, sink, form=form, seed=seed)
        self.execute(step)
        return step

    def forwards_for_caller(
        self, inputs: Sequence[Any], sink: OutputSink, form: Hashable = None, seed: int | None = None
    ) -> Step:
        """Run all forwards of a mini-batch and give the outputs to the caller."""

        def run() -> Step:
            step = self.forwards(inputs, sink, form, seed)
            hold_for_caller(tensors(sink.outputs))
            return step

        return self.exclusively(run)

    def backwards(self, forward: Step, sink: OutputSink, form: Hashable = None) -> Step:
        """Run the backwards of such forwards.

        With accelerators they run on the calling thread: see :meth:`pipepart.runtime.step.Step.backward_here`.
        """

        on_workers = all(device.type == "cpu" for device in self.devices)

        def run() -> Step:
            parts = len(forward.input_gradients)
            with nullcontext() if self._streams is None else self._streams.nested():
                step = self.new_step(self._orders.backwards(parts), [None] * parts, sink, forward, form=form)
                self.execute(step, on_workers)
            return step

        return self.exclusively(run, is_backward=not on_workers)

    def execute(self, step: Step, on_workers: bool = True) -> None:
        """Run a step to its end.

        Args:
            step: a step that has not run.
            on_workers: otherwise it is a backward that runs on the calling thread, without a timeout.

        Raises:
            RuntimeError: the engine is closed.
            TimeoutError: no action has ended for too long.
            BaseException: the first failure on any device, with its own type and traceback. By then every worker has
                left the step, or the engine is closed.
        """
        self.check_open()
        step.begin()
        if on_workers:
            self._run_on_workers(step)
        try:
            if on_workers:
                step.finish()
            else:
                step.backward_here()
        except BaseException as error:  # the error of a worker comes first, and says more
            step.fail(error)
        if step.failure is not None:
            failure = explained(step, self._plan)
            step.forget()
            self._leave_ranks(failure)
            try:
                raise failure
            finally:
                del failure  # break the cycle: traceback, this frame, error, traceback

    def _leave_ranks(self, error: BaseException) -> None:
        """Tell the other ranks of a failure, and close: messages of the step may still be on their way."""
        if self._links is not None:
            self._links.ranks.tell(error)
            self.close(f"the pipeline is closed, as a step has failed: {serialize_exception(error)['what']}")

    def close(self, reason: str) -> None:
        """End the workers. Later runs raise an error with ``reason``. Closing twice does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = reason
            if self._links is not None:
                self._links.ranks.close(reason)
            if not self._handing_out:
                _stop(self.workers)

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
        self._closed = FORKED

    def _run_on_workers(self, step: Step) -> None:
        """Give the step to every worker and wait for all of them. An interrupt in this thread ends the step."""
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        ranks = None if self._links is None else self._links.ranks

        def failed_elsewhere(error: BaseException) -> None:
            step.fail(error)
            done.put(error)

        now = partial(doing, step, self.workers, self._rows, self._names)
        try:
            # Layers see the caller's context variables; a context runs on one thread at a time, so each gets a copy.
            jobs = (partial(copy_context().run, partial(step.work, row)) for row in self._rows)
            # The threads of autograd for accelerators, which Python does not list, may run Python.
            if others_run() or any(device.type != "cpu" for device in self.devices):
                step.turns = quick_turns
            with nullcontext() if ranks is None else ranks.telling(failed_elsewhere, now):
                self._hand_out(jobs, partial(done.put, None))
                wait_for(step, done, self._timeout, self.workers, self._rows, self._names, ranks)
        except BaseException as interrupt:  # Ctrl-C, the timeout's, or the failure of another rank
            step.fail(interrupt)
            if ranks is not None:
                ranks.tell(interrupt)
            gives_up = ranks is not None or isinstance(interrupt, StepTimeoutError)
            self._wait_until_idle(_GRACE_SECONDS if gives_up else self._timeout)
            step.forget()
            self._leave_ranks(interrupt)
            raise

    def _hand_out(self, jobs: Iterable[Job], then: Job | None = None) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(self._closed)
            self._handing_out = True
            try:
                for worker, job in zip(self.workers, jobs, strict=True):
                    worker.submit(job, then)
            finally:
                self._handing_out = False
                if self._closed:  # by the handler of a signal
                    _stop(self.workers)

    def _wait_until_idle(self, seconds: float | None) -> None:
        """Wait until every worker is idle.

        Workers that are still busy after ``seconds``, or at a second interrupt, are given up.
        """
        missing = set(range(len(self.workers)))
        try:
            idle: SimpleQueue[int] = SimpleQueue()
            with self._lock:
                if not self._closed:
                    self._hand_out(partial(idle.put, number) for number in range(len(self.workers)))
            if self._closed:  # by another thread: each worker finishes its jobs and ends
                missing -= {number for number, worker in enumerate(self.workers) if worker.join(seconds)}
            while missing and not self._closed:
                missing.discard(idle.get(timeout=seconds))
        except Empty:
            pass
        except BaseException:
            self._give_up(missing, "a layer did not return after an interrupt")
            raise
        if missing:
            names = " and ".join(self._names[self._rows[number]] for number in sorted(missing))
            self._give_up(missing, f"a layer on {names} did not return when a step was given up")

    def _give_up(self, workers: set[int], reason: str) -> None:
        self._stuck |= workers
        self.close(f"the pipeline is closed: {reason}")


@dataclass(frozen=True)
class _Claim:
    """The exclusive use of the stages by a thread.

    Attributes:
        thread: its identifier.
        is_backward: whether a backward runs on that thread itself.
    """

    thread: int
    is_backward: bool


def _stop(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.stop()
