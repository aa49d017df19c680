"""Step: each worker runs the actions of its device, and the first failure ends the step for all workers.

::

    worker of device 0                      worker of device 1
    F(0, 3) ── output under (F, 1, 3) ─────▶ recv, F(1, 3), loss
    recv, B(0, 3) ◀── gradients under (B, 0, 3) ── B(1, 3)

An action has three parts, in the table ``PARTS``: it *receives* what its stage needs, and waits for it; the stage
*computes*; and it *sends* what other stages need. A message is keyed by the action that receives it. What a stage keeps
from one of its actions to the next is in its :class:`StageRun`, which its worker alone uses, so workers share nothing
but messages.

The way of one micro-batch through a stage: ``Step.work`` picks the action, ``Step.do`` runs its three parts,
``StageRun.forward`` keeps what the backward needs, ``Stage.run`` prepares the input, ``Stage.run_layers`` calls the
layers.

A forward alone, and the backward that autograd asks for later, are steps too: the second goes on with the stages of the
first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from schedules import Action, Kind

from ..autograd import graph_cut
from ..workers.modes import Modes
from ..workers.process_settings import quick_turns
from ..workers.streams import Wait, waits
from .emulation import DeviceEmulation
from .failure.notes import PLACE, add_note
from .observe.recorder import Recorder, Watch, WatchedTransport
from .offload import CopyQueue
from .order import Order
from .replay.randomness import RngKeys
from .sinks import LossSink
from .stage import Stage
from .stage_run import Held, StageRun
from .stage_runs import stage_runs
from .transport.compress import Compressed
from .transport.cuda import Callers, Streams, StreamTransport
from .transport.links import Links, Table
from .transport.ranks import RankTransport
from .transport.reductions import Reductions
from .transport.skips import Routes, SkipTransport
from .transport.threads import Key, Stopped, ThreadTransport, Transport

# What a kind of action does: ``recv(step, run, k)``, ``compute(run, k, given)`` and ``send(step, run, k, made)``.
Part = Callable[..., Any]
Parts = Mapping[Kind, tuple[Part, Part, Part]]


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
        reads_pinned: whether inputs or targets are in pinned memory, which the caller may write when the step returns.
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
        held: what each stage held when it was raised.
        recorder: of the times of actions and messages, if they are taken.
        guards: of the stages, if they are guarded against numbers that are not finite.
        skips: the transport, if live values go past stages.
    """

    def __init__(
        self,
        order: Order,
        stages: Sequence[Stage],
        inputs: Sequence[Any],
        sink: LossSink,
        *,
        compressed: Compressed,
        forward: Step | None = None,
        optimizers: Sequence[Optimizer | None] = (),
        recorder: Recorder | None = None,
        streams: Streams | None = None,
        reads_pinned: bool = False,
        emulation: DeviceEmulation | None = None,
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
        self.held: dict[int, Held] = {}
        self.here = range(len(schedule.actions)) if links is None else links.local
        self.guards = [stage.guard for stage in stages if stage.guard is not None]
        self.current: list[tuple[Action | None, float]] = [(None, time.monotonic()) for _ in schedule.actions]
        self.awaiting: list[Key | None] = [None for _ in schedule.actions]
        self.input_gradients: list[graph_cut.Gradients] = [()] * schedule.micro_batches
        self.modes = Modes.current()
        self._over = False
        self._lock = threading.Lock()
        self._streams = streams
        self._has_forwards = forward is None
        self._is_first = [schedule.previous_stage(stage) is None for stage in range(schedule.stages)]
        self._worker_of = schedule.device_of
        self._parts: Parts = PARTS
        self._host_copies: list[torch.Event | torch.cuda.Event] = []
        self._mailboxes = ThreadTransport(schedule)
        transport: Transport = self._mailboxes
        if streams is not None:
            transport = StreamTransport(transport, schedule, streams, recorder and recorder.arrivals)
            if reads_pinned:
                self._parts = {**PARTS, Kind.F: (*PARTS[Kind.F][:2], Step._send_output_and_note)}
        if emulation is not None:
            transport = emulation.transport(transport, schedule)
            self._parts = _within(self._parts, lambda kind, run, _: emulation.computing(kind, run.index))
        self._remote: RankTransport | None = None
        self._sent_correction = False
        self._reductions = links and links.reductions
        if links is not None and table is not None:
            transport = self._remote = RankTransport(
                transport, schedule, links, table, self._follower, inputs, self.fail
            )
        if (watch := Watch.wanted(schedule, stages, recorder)) is not None:
            transport = WatchedTransport(transport, schedule, watch)
            self._parts = watch.parts(self._parts)
        transport = compressed.transport(transport, schedule, recorder and recorder.errors)
        if schedule.versions:
            self._parts = _within(self._parts, _on_version)
        self.skips = forward.skips if forward else None
        if (past := routes.of(inputs) if routes else {}) or self.skips:
            transport = self.skips = SkipTransport(transport, schedule, past, self.awaiting, self.skips)
        self._transport = transport
        self._inputs = inputs
        for stage in stages:
            if stage.replica and self._worker_of[stage.index] in self.here:
                stage.replica.begin(self._has_forwards, self.modes.grad)
        self.recorder = recorder
        self.keys = forward.keys if forward else RngKeys(seed)
        self.runs = (
            forward.runs
            if forward
            else stage_runs(order, stages, self.keys, self.modes, sink, optimizers, copy_queues, self.here)
        )
        if emulation is not None:
            emulation.begin(optimizers)
        # A backward begins and ends on the streams of its forward, as autograd's do.
        self._callers: Callers = forward._callers if forward else streams.callers() if streams else {}
        if streams:
            streams.begin(self._callers)

    def begin(self, scaled: bool) -> None:
        """Before the step, on the caller's thread; ``scaled`` gradients may overflow."""
        kinds = {action.kind for row in self.schedule.actions for action in row}
        for guard in self.guards:
            guard.begin(scaled, not kinds.isdisjoint((Kind.B, Kind.I)))
        if self._reductions is not None and Kind.REDUCE_GRAD in kinds:
            for run in self.runs.values():
                self._reductions.begin(run.stage.shared.own_parameters())

    def work(self, worker: int) -> None:
        """Run the actions of one device, on its worker. Does not raise."""
        streams = self._streams
        try:
            with quick_turns, self.modes.entered(), streams.entered(worker) if streams else nullcontext():
                try:
                    do = streams.paced(worker, self.do) if streams else self.do
                    if self._remote is not None:
                        self._remote.begin(worker)
                    for action in self.schedule.actions[worker]:
                        if self._over:
                            return
                        self.current[worker] = action, time.monotonic()
                        do(action)
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

    def do(self, action: Action) -> None:
        """Run one action.

        Raises:
            Stopped: the step has failed elsewhere.
            BaseException: the error of the action, with a note that names the action.
        """
        kind, stage, micro_batch, _ = action
        recv, compute, send = self._parts[kind]
        run = self.runs[stage]
        try:
            send(self, run, micro_batch, compute(run, micro_batch, recv(self, run, micro_batch)))
        except Stopped:
            raise
        except BaseException as error:
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
            for action in self._backwards_left():
                with streams.entered(self._worker_of[action.stage]) if streams else nullcontext():
                    self.do(action)
            if self._remote is not None:
                with streams.entered(self.here[0]) if streams else nullcontext():
                    self._remote.end()
                self._remote.finish()
        finally:
            self._end()
        if streams:
            # This thread is on other streams than the caller was, which copy gradients to inputs that are elsewhere.
            # Threads of other devices go on meanwhile, and may let go of gradients while a further step goes on here.
            streams.end(streams.callers())
            streams.hold_for_caller(self.input_gradients)

    def fail(self, error: BaseException, worker: int | None = None) -> None:
        """End the step: the first error is kept, and every worker that waits or will wait gives up."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self.failure, self.failed_on = error, worker
            self.held = {number: run.held() for number, run in self.runs.items()}
        self._mailboxes.stop()
        if self._remote is not None:
            self._remote.stop(error)

    def finish(self) -> None:
        """Called after the last worker, whether the step has failed or not.

        Raises:
            RuntimeError: a device has failed.
        """
        if self._remote is not None and self.failure is None:
            self._remote.finish()
        else:
            self.keys.finish()
        self._end()
        for event in self._host_copies:
            waits.host_wait(Wait.HOST_BEHIND_PINNED, event)

    def forget(self) -> None:
        """Release the failure and all tensors, which its traceback would keep alive."""
        self.failure = None
        for run in self.runs.values():
            run.forget()
        self._inputs = ()
        self.input_gradients.clear()
        self._mailboxes.stop()
        with suppress(Exception):  # of a device that has failed: the step has raised it
            self._end()

    def _follower(self, parameter: int, stage: int) -> int:
        """Return the later stage that sends a stage the gradient of a shared parameter."""
        route = next(route for route in self.runs[stage].routes if route.number == parameter)
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
        found = [
            Action(kind, run.index, micro_batch)
            for micro_batch in range(self.schedule.micro_batches)
            for run in reversed(self.runs.values())
            if micro_batch in run.stashes or micro_batch in run.inputs
            for kind in (Kind.RECOMPUTE, Kind.RELOAD, Kind.B)
        ]
        if self.schedule.replicas > 1:
            found += [Action(Kind.REDUCE_GRAD, run.index) for run in reversed(self.runs.values())]
        return found

    def _recv(self, stage: int, key: Key) -> Any:
        worker = self._worker_of[stage]
        self.awaiting[worker] = key
        message = self._transport.recv(stage, key)
        self.awaiting[worker] = None
        return message

    def _nothing(self, run: StageRun, micro_batch: int, made: None = None) -> None:
        """Receive or send nothing."""

    def _wait_offload(self, run: StageRun, micro_batch: int) -> None:
        """Wait until the stash is on the host."""
        run.wait_offload(micro_batch)

    def _recv_input(self, run: StageRun, micro_batch: int) -> Any:
        if self._is_first[run.index]:
            return self._inputs[micro_batch]
        return self._recv(run.index, (Kind.F, run.index, micro_batch))

    def _send_output(self, run: StageRun, micro_batch: int, message: Any) -> None:
        if not run.is_last:
            following = run.index + 1
            self._transport.send(run.index, following, (Kind.F, following, micro_batch), message)
        run.start_offload(micro_batch)

    def _recv_correction(self, run: StageRun, _: None) -> None:
        """Before the step of a stage's optimizer, receive the factor of the gradients if another rank knows it."""
        if self._remote is not None and run.index in self._remote.corrected:
            self.sink.adopt_correction(float(self._recv(run.index, (Kind.OPT_STEP, run.index, 0))))

    def _send_correction(self, sender: int, remote: RankTransport) -> None:
        """Behind the first backward of the last stage that knows it, send that factor."""
        factor = torch.tensor(self.sink.correction(), dtype=torch.float64)
        for stage in remote.corrected:
            remote.send(sender, stage, (Kind.OPT_STEP, stage, 0), factor)
        self._sent_correction = True

    def _send_output_and_note(self, run: StageRun, micro_batch: int, message: Any) -> None:
        """Send the output, and record when copies from the caller's pinned memory are done."""
        self._send_output(run, micro_batch, message)
        if self._streams and (run.is_last or self._is_first[run.index]):
            event = self._streams.behind_compute(self._worker_of[run.index])
            self._host_copies += [] if event is None else [event]

    def _recv_gradients(self, run: StageRun, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients that a backward starts from, for all roots of the stash."""
        run.wait_reload(micro_batch)
        stage = run.index
        stash = run.stashes[micro_batch]
        gradients: graph_cut.Gradients = ()
        if stash.roots and not run.is_last:
            gradients = self._recv(stage, (Kind.B, stage, micro_batch))
        elif stash.roots:
            gradients = self.sink.gradients(micro_batch)
        if stash.added:
            gradients = (*gradients, *self.sink.added_gradients(stage, micro_batch))
        for route in run.routes:
            if route.following is not None:
                arrived = self._recv(stage, (route.number, stage, micro_batch))
                if arrived is not None:
                    run.add_root(micro_batch, route.tensor)
                    gradients = (*gradients, arrived)
        return gradients

    def _send_gradients(self, run: StageRun, micro_batch: int, found: graph_cut.Gradients) -> None:
        """Send the gradients of the input to the stage before, and those of replicas of shared parameters."""
        stage = run.index
        for route in run.routes:
            if route.previous is not None:
                key = route.number, route.previous, micro_batch
                self._transport.send(stage, route.previous, key, route.tensor.grad)
                route.tensor.grad = None
        if self._is_first[stage]:
            self.input_gradients[micro_batch] = found
        elif found:
            self._transport.send(stage, stage - 1, (Kind.B, stage - 1, micro_batch), found)
        if self._remote is not None and run.is_last and self.sink.is_complete and not self._sent_correction:
            self._send_correction(stage, self._remote)

    def _recv_replicas(self, run: StageRun, _: None) -> list[Any]:
        """Return the gradients of further replicas, for a stage of the first."""
        if self._reductions is not None:
            self._add_up_on_ranks(run, self._reductions)
        if run.stage.replica or self._reductions is not None:
            return []
        stage, apart = run.index, self.schedule.model_stages
        return [
            self._recv(stage, (Kind.REDUCE_GRAD, stage, 0, other))
            for other in range(stage + apart, self.schedule.stages, apart)
        ]

    def _add_up_on_ranks(self, run: StageRun, reductions: Reductions) -> None:
        """Add up the gradients of a stage over replicas on other ranks, while further stages still go backward."""
        stage = run.index
        worker = self._worker_of[stage]

        def arrived(number: int) -> None:
            self._mailboxes.send(stage, stage, (Kind.REDUCE_GRAD, stage, number), None)

        def wait(number: int) -> None:
            self.awaiting[worker] = key = Kind.REDUCE_GRAD, stage, number
            self._mailboxes.recv(stage, key)
            self.awaiting[worker] = None

        reductions.add_up(worker, run.stage.shared.own_parameters(), arrived, wait, self.fail)

    def _send_to_first_replica(self, run: StageRun, _: None, gradients: Any) -> None:
        if run.stage.replica:
            first = run.index % self.schedule.model_stages
            self._transport.send(run.index, first, (Kind.REDUCE_GRAD, first, 0, run.index), gradients)

    def _place(self, action: Action) -> str:
        of, micro_batch, where = self.schedule, action.micro_batch, self.runs[action.stage].stage.where
        replica, stage = divmod(action.stage, of.model_stages)
        which = f" of copy {replica}" if of.replicas > 1 else ""
        part = (
            "all micro-batches" if micro_batch is None else f"micro-batch {micro_batch} of {of.micro_batches}"
        )
        return f"{PLACE}stage {stage} of {of.model_stages}{which} on {where}, {part} (action {action})"


PARTS: dict[Kind, tuple[Part, Part, Part]] = {
    Kind.F: (Step._recv_input, StageRun.forward, Step._send_output),
    Kind.B: (Step._recv_gradients, StageRun.backward, Step._send_gradients),
    Kind.I: (Step._recv_gradients, StageRun.backward_inputs, Step._send_gradients),
    Kind.W: (Step._nothing, StageRun.backward_weights, Step._nothing),
    Kind.RECOMPUTE: (Step._nothing, StageRun.recompute, Step._nothing),
    Kind.OFFLOAD: (Step._wait_offload, StageRun.offload, Step._nothing),
    Kind.RELOAD: (Step._nothing, StageRun.reload, Step._nothing),
    Kind.REDUCE_GRAD: (Step._recv_replicas, StageRun.reduce, Step._send_to_first_replica),
    Kind.OPT_STEP: (Step._recv_correction, StageRun.update, Step._nothing),
}


def _within(parts: Parts, entered: Callable[[Kind, StageRun, Any], AbstractContextManager[object]]) -> Parts:
    """Return the parts with each computation within a context."""

    def computed(kind: Kind, compute: Part, run: StageRun, micro_batch: int | None, given: Any) -> Any:
        with entered(kind, run, micro_batch):
            return compute(run, micro_batch, given)

    return {kind: (recv, partial(computed, kind, part), send) for kind, (recv, part, send) in parts.items()}


def _on_version(kind: Kind, run: StageRun, micro_batch: int) -> AbstractContextManager[object]:
    """Set the weights to the version of the micro-batch, in an asynchronous schedule."""
    if run.versions is None or kind in (Kind.OPT_STEP, Kind.REDUCE_GRAD):
        return nullcontext()
    return run.versions.used(micro_batch)
