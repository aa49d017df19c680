"""Step: runs the actions of each device on its worker; the first failure ends the step for all workers.

What a stage keeps from one of its actions to the next is in its :class:`StageRun`, which its worker alone uses, so
workers share nothing but messages. The way of one micro-batch through a stage: ``Step.work`` calls the action's
function of :class:`StageActions`, ``StageRun.forward`` keeps what the backward needs, ``Stage.run`` calls the layers.

A forward alone, and the backward that autograd asks for later, are steps too: the second goes on with the stages of the
first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from torch.optim import Optimizer

from schedules import Action, Kind

from ..autograd.own_copy import tensors
from ..loss import losses_of_stage
from ..workers.modes import Modes
from ..workers.streams import hold_for_caller
from .actions import Around, Compute, Emulation, Exchange, StageActions
from .failure.notes import PLACE, add_note
from .observe.recorder import RecordedTransport, Recorder
from .offload import CopyQueue
from .order import Order
from .replay.randomness import RngKeys
from .sinks import LossSink
from .stage import Stage
from .stage_run import StageRun
from .transport.compress import CompressedLinks, CompressingTransport
from .transport.cuda import Callers, Pace, Streams, StreamTransport
from .transport.links import Links, Table
from .transport.ranks import RankTransport
from .transport.skips import Routes, SkipTransport
from .transport.threads import Key, Stopped, ThreadTransport, Transport, sender_of

# The actions of each micro-batch in a backward on the calling thread.
_LEFT = (Kind.RECOMPUTE, Kind.RELOAD, Kind.B)


class Step:
    """One pass over a schedule's actions, on one mini-batch.

    Args:
        order: the actions of each device.
        stages: all stages, in the order of the schedule.
        inputs: the first stage's input for each micro-batch.
        sink: takes the last stage's outputs, and gives their gradients.
        compressed: the links that send messages in fewer bytes.
        forward: the step whose graphs this one goes backward through; None for one that has forwards.
        optimizers, recorder: for an order with optimizer steps; to take the times of actions and messages.
        streams: of the workers, if there are accelerators.
        emulation, routes: of virtual devices, and of live values that go past stages, if there are any.
        copy_queues: of the workers, if any stage offloads.
        links, table: to other ranks, and what is known of the messages that go there, if stages are on several.
        seed: of the random numbers; None for the caller's generator.

    Attributes:
        here: the workers of this process.
        runs: the stages of these workers during this step, by number.
        input_gradients: of each micro-batch's input, once the step has ended.
        current: for each worker the action that it is at, None when it has none left, and since when: the seconds of
            ``time.monotonic()``.
        awaiting: for each worker the key of the message that it waits for.
        failure: the exception that ended the step, if any did.
        failed_on: the device whose worker raised it; None for the caller's thread.
        recorder: of the times of actions and messages, if they are taken.
        skips: the transport, if live values go past stages.
        turns: entered by the workers; sets how long a thread keeps the interpreter.
    """

    def __init__(
        self,
        order: Order,
        stages: Sequence[Stage],
        inputs: Sequence[Any],
        sink: LossSink,
        *,
        compressed: CompressedLinks,
        forward: Step | None = None,
        optimizers: Sequence[Optimizer | None] = (),
        recorder: Recorder | None = None,
        streams: Streams | None = None,
        emulation: Emulation | None = None,
        routes: Routes | None = None,
        copy_queues: Sequence[CopyQueue] = (),
        links: Links | None = None,
        table: Table | None = None,
        seed: int | None = None,
    ) -> None:
        self.schedule = schedule = order.schedule
        self.sink = sink
        self.failure: BaseException | None = None
        self.failed_on: int | None = None
        self.turns: AbstractContextManager[object] = nullcontext()
        self.here = range(len(schedule.actions)) if links is None else links.local
        self.current: list[tuple[Action | None, float]] = [(None, time.monotonic()) for _ in schedule.actions]
        self.modes = Modes.current()
        self._over = False
        self._lock = threading.Lock()
        self._streams = streams
        self._has_forwards = forward is None
        self._worker_of = schedule.device_of
        self._kinds = order.kinds
        self.recorder = recorder
        self.keys = forward.keys if forward else RngKeys(seed)
        for stage in stages:
            if stage.replica and self._worker_of[stage.index] in self.here:
                stage.replica.begin(self._has_forwards, self.modes.grad)
        queues = list(copy_queues)
        self._added = forward._added if forward else {worker: losses_of_stage() for worker in self.here}
        self.runs: dict[int, StageRun] = (
            forward.runs
            if forward
            else {
                stage.index: StageRun(
                    stage,
                    order,
                    self.keys,
                    self.modes,
                    sink,
                    self._added[row],
                    optimizers,
                    *queues[row : row + 1],
                )
                for stage in stages
                if (row := self._worker_of[stage.index]) in self.here
            }
        )
        self._mailboxes = ThreadTransport(schedule)
        self._reductions = links and links.reductions
        self._exchange = exchange = Exchange(
            schedule, sink, inputs, self._mailboxes, self._mailboxes.awaiting
        )
        self.awaiting, self.input_gradients = exchange.awaiting, exchange.input_gradients
        around: list[Around] = []
        transport: Transport = self._mailboxes
        if streams is not None:
            transport = StreamTransport(transport, schedule, streams, recorder and recorder.arrivals)
        if emulation is not None:
            transport = emulation.transport(transport, schedule)
            around.append(emulation.around)
        self._remote: RankTransport | None = None
        if links is not None and table is not None:
            transport = self._remote = RankTransport(
                transport, schedule, links, table, self.sender_of, inputs, self.fail, self.awaiting
            )
            exchange.reductions = self._reductions
            around += [] if self._reductions is None else [self._reductions.around]
        if recorder is not None:
            transport = RecordedTransport(transport, schedule, recorder)
            around.append(recorder.timed)
        if compressed:
            devices = [stage.device for stage in stages]
            transport = CompressingTransport(transport, schedule, compressed, devices)
        if schedule.versions:
            around.append(_on_version)
        self.skips = forward.skips if forward else None
        if (past := routes.of(inputs) if routes else {}) or self.skips:
            transport = self.skips = SkipTransport(transport, schedule, past, self.skips)
        exchange.transport = transport
        kinds = order.kinds if forward is None else order.kinds.union(_LEFT)
        self._tables = {
            number: StageActions(run, exchange).table(kinds, around) for number, run in self.runs.items()
        }
        if emulation is not None:
            emulation.begin(optimizers)
        # A backward begins and ends on the streams of its forward, as autograd's do.
        self._callers: Callers = forward._callers if forward else streams.callers() if streams else {}
        if streams:
            streams.begin(self._callers)

    def begin(self) -> None:
        """Before the step, on the caller's thread."""
        if self._reductions is not None and Kind.REDUCE_GRAD in self._kinds:
            for run in self.runs.values():
                self._reductions.begin(run.stage.shared)

    def work(self, worker: int) -> None:
        """Run the actions of one device, on its worker. Does not raise."""
        streams = self._streams
        try:
            with self.turns, self.modes.entered(), streams.entered(worker) if streams else nullcontext():
                try:
                    if self._remote is not None:
                        self._remote.begin(worker)
                    pace = streams.pace(worker) if streams else None
                    with self._reductions.entered() if self._reductions else nullcontext():
                        self._run(worker, self.schedule.actions[worker], pace)
                    if self._remote is not None:
                        self._remote.end()
                finally:
                    for run in self.runs_on(worker):
                        run.settle()
                for run in self.runs_on(worker) if self._has_forwards else ():
                    run.finish()
                self.current[worker] = None, time.monotonic()
        except Stopped:
            pass
        except BaseException as error:
            self.fail(error, worker)

    def _run(self, worker: int, actions: Sequence[Action], pace: Pace | None = None) -> None:
        """Run actions of one device.

        Raises:
            Stopped: the step has failed elsewhere.
            BaseException: the error of an action, with a note that names the action.
        """
        tables, current, now = self._tables, self.current, time.monotonic
        action = None
        try:
            with self._added[worker]:
                for action in actions:
                    if self._over:
                        raise Stopped
                    current[worker] = action, now()
                    if pace is not None:
                        pace.wait()
                    tables[action.stage][action.kind](action.micro_batch)
                    if pace is not None:
                        pace.queued()
        except Stopped:
            raise
        except BaseException as error:
            if action is not None:
                add_note(error, self._place(action))
            raise

    def backward_here(self) -> None:
        """Go backward through all stages on the calling thread, one micro-batch after the other.

        Autograd runs the backward of an accelerator's tensors on a thread of that device. One that called the
        workers and waited would wait for ever: their backwards need the same thread.
        """
        streams = self._streams
        try:
            if self._remote is not None:
                for worker in self.here:
                    self._remote.begin(worker)
            with self._reductions.entered() if self._reductions else nullcontext():
                for action in self._backwards_left():
                    worker = self._worker_of[action.stage]
                    with streams.entered(worker) if streams else nullcontext():
                        self._run(worker, [action])
            if self._remote is not None:
                with streams.entered(self.here[0]) if streams else nullcontext():
                    self._remote.end()
                self._remote.finish()
        finally:
            self._end()
        if streams:
            # This thread may be on other streams than the caller was, which copy gradients to inputs that are elsewhere
            # and read them. A further backward, of a forward on other streams, does not wait for these.
            streams.end(streams.callers())
            hold_for_caller(tensors(self.input_gradients))

    def fail(self, error: BaseException, worker: int | None = None) -> None:
        """End the step: the first error is kept, and every worker that waits or will wait gives up."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self.failure, self.failed_on = error, worker
        self._mailboxes.stop()  # first of all: whatever goes wrong below, no worker waits for ever
        if self._remote is not None:
            self._remote.stop(error)

    def finish(self) -> None:
        """Called after the last worker, whether the step has failed or not.

        Raises:
            RuntimeError: a device has failed.
        """
        for run in self.runs.values():
            run.stage.finish()
        if self._remote is not None and self.failure is None:
            self._remote.finish()
        else:
            self.keys.finish()
        self._end()

    def forget(self) -> None:
        """Release the failure and all tensors, which its traceback would keep alive."""
        self.failure = None
        for run in self.runs.values():
            run.forget()
        self._exchange.forget()
        self._mailboxes.stop()
        with suppress(Exception):  # of a device that has failed: the step has raised it
            self._end()

    def sender_of(self, key: Key) -> int:
        """Return the stage that sends a message."""
        number, stage = key[:2]
        if isinstance(number, Kind):
            return sender_of(key)
        route = next(route for route in self.runs[stage].routes if route.number == number)
        assert route.following is not None
        return route.following

    def runs_on(self, worker: int) -> list[StageRun]:
        """Return the stages of one device."""
        return [self.runs[stage] for stage in self.schedule.stages_of(worker)]

    def _end(self) -> None:
        if self._streams:
            self._streams.end(self._callers)

    def _backwards_left(self) -> list[Action]:
        """Return the backwards that wait to be done, one micro-batch after the other."""
        actions = [
            Action(kind, run.index, micro_batch)
            for micro_batch in range(self.schedule.micro_batches)
            for run in reversed(self.runs.values())
            if micro_batch in run.stashes or micro_batch in run.inputs
            for kind in _LEFT
        ]
        if Kind.REDUCE_GRAD in self._kinds:
            actions += [Action(Kind.REDUCE_GRAD, run.index) for run in reversed(self.runs.values())]
        return actions

    def _place(self, action: Action) -> str:
        of, micro_batch, where = self.schedule, action.micro_batch, self.runs[action.stage].stage.where
        replica, stage = divmod(action.stage, of.model_stages)
        which = f" of copy {replica}" if of.replicas > 1 else ""
        part = (
            "all micro-batches" if micro_batch is None else f"micro-batch {micro_batch} of {of.micro_batches}"
        )
        return f"{PLACE}stage {stage} of {of.model_stages}{which} on {where}, {part} (action {action})"


def _on_version(kind: Kind, run: StageRun, compute: Compute) -> Compute:
    """Set the weights to the version of the micro-batch while an action computes, in an asynchronous schedule."""
    if run.versions is None or kind in (Kind.OPT_STEP, Kind.REDUCE_GRAD):
        return compute
    versions = run.versions

    def computed(micro_batch: int, received: Any) -> Any:
        with versions.used(micro_batch):
            return compute(micro_batch, received)

    return computed
