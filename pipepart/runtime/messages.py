"""Messages: what the actions of a step receive before they compute, and what they send behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from schedules import Kind, Schedule

from ..autograd import graph_cut
from .sinks import LossSink
from .stage_run import StageRun
from .transport.ranks import RankTransport
from .transport.reductions import Reductions
from .transport.threads import Key, ThreadTransport, Transport


class Messages:
    """The messages of one step. Each method is called on the worker of the stage that it is about.

    Args:
        schedule, sink: of the step.
        inputs: the first stage's input for each micro-batch.
        mailboxes: of the workers.
        reductions: over replicas on other ranks, if there are any.
        fail: ends the step; None in one process, where it would keep the step alive.

    Attributes:
        transport: carries the messages.
        runs: the stages of this process during the step, by number.
        remote: the part of it that carries them between ranks, if there are several.
        awaiting: for each worker the key of the message that it waits for.
        input_gradients: of each micro-batch's input, once the step has ended.
    """

    def __init__(
        self,
        schedule: Schedule,
        sink: LossSink,
        inputs: Sequence[Any],
        mailboxes: ThreadTransport,
        reductions: Reductions | None,
        fail: Callable[[BaseException], None] | None,
    ) -> None:
        self.transport: Transport = mailboxes
        self.runs: Mapping[int, StageRun] = {}
        self.remote: RankTransport | None = None
        self.awaiting: list[Key | None] = [None for _ in schedule.actions]
        self.input_gradients: list[graph_cut.Gradients] = [()] * schedule.micro_batches
        self._schedule = schedule
        self._sink = sink
        self._inputs = inputs
        self._mailboxes = mailboxes
        self._reductions = reductions
        self._fail = fail
        self._is_first = [schedule.previous_stage(stage) is None for stage in range(schedule.stages)]
        self._worker_of = schedule.device_of
        self._sent_correction = False

    def runs_on(self, worker: int) -> list[StageRun]:
        """Return the stages of one device."""
        return [self.runs[stage] for stage in self._schedule.stages_of(worker)]

    def forget(self) -> None:
        """Release all tensors."""
        self._inputs = ()
        self.input_gradients.clear()

    def nothing(self, run: StageRun, micro_batch: int, made: None = None) -> None:
        """Receive or send nothing."""

    def wait_offload(self, run: StageRun, micro_batch: int) -> None:
        """Wait until the stash is on the host."""
        run.wait_offload(micro_batch)

    def recv_input(self, run: StageRun, micro_batch: int) -> Any:
        """Return the input of a stage."""
        if self._is_first[run.index]:
            return self._inputs[micro_batch]
        return self._recv(run.index, (Kind.F, run.index, micro_batch))

    def send_output(self, run: StageRun, micro_batch: int, message: Any) -> None:
        """Send the output of a stage to the next one."""
        if not run.is_last:
            following = run.index + 1
            self.transport.send(run.index, following, (Kind.F, following, micro_batch), message)
        run.start_offload(micro_batch)

    def recv_correction(self, run: StageRun, _: None) -> None:
        """Before the step of a stage's optimizer, receive the factor of the gradients if another rank knows it."""
        if self.remote is not None and run.index in self.remote.corrected:
            self._sink.adopt_correction(float(self._recv(run.index, (Kind.OPT_STEP, run.index, 0))))

    def recv_gradients(self, run: StageRun, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients that a backward starts from, for all roots of the stash."""
        run.wait_reload(micro_batch)
        stage = run.index
        stash = run.stashes[micro_batch]
        gradients: graph_cut.Gradients = ()
        if stash.roots and not run.is_last:
            gradients = self._recv(stage, (Kind.B, stage, micro_batch))
        elif stash.roots:
            gradients = self._sink.gradients(micro_batch)
        if stash.added:
            gradients = (*gradients, *self._sink.added_gradients(stage, micro_batch))
        for route in run.routes:
            if route.following is not None:
                arrived = self._recv(stage, (route.number, stage, micro_batch))
                if arrived is not None:
                    run.add_root(micro_batch, route.tensor)
                    gradients = (*gradients, arrived)
        return gradients

    def send_gradients(self, run: StageRun, micro_batch: int, found: graph_cut.Gradients) -> None:
        """Send the gradients of the input to the stage before, and those of replicas of shared parameters."""
        stage = run.index
        for route in run.routes:
            if route.previous is not None:
                key = route.number, route.previous, micro_batch
                self.transport.send(stage, route.previous, key, route.tensor.grad)
                route.tensor.grad = None
        if self._is_first[stage]:
            self.input_gradients[micro_batch] = found
        elif found:
            self.transport.send(stage, stage - 1, (Kind.B, stage - 1, micro_batch), found)
        if self.remote is not None and run.is_last and self._sink.is_complete and not self._sent_correction:
            self._send_correction(stage, self.remote)

    def recv_replicas(self, run: StageRun, _: None) -> list[Any]:
        """Return the gradients of further replicas, for a stage of the first."""
        if self._reductions is not None:
            self._add_up_on_ranks(run, self._reductions)
        if run.stage.replica or self._reductions is not None:
            return []
        stage, apart = run.index, self._schedule.model_stages
        return [
            self._recv(stage, (Kind.REDUCE_GRAD, stage, 0, other))
            for other in range(stage + apart, self._schedule.stages, apart)
        ]

    def send_to_first_replica(self, run: StageRun, _: None, gradients: Any) -> None:
        """Send the gradients of a further replica to the first."""
        if run.stage.replica:
            first = run.index % self._schedule.model_stages
            self.transport.send(run.index, first, (Kind.REDUCE_GRAD, first, 0, run.index), gradients)

    def _send_correction(self, sender: int, remote: RankTransport) -> None:
        """Behind the first backward of the last stage that knows it, send that factor."""
        factor = torch.tensor(self._sink.correction(), dtype=torch.float64)
        for stage in remote.corrected:
            remote.send(sender, stage, (Kind.OPT_STEP, stage, 0), factor)
        self._sent_correction = True

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

        assert self._fail is not None
        reductions.add_up(worker, run.stage.shared.own_parameters(), arrived, wait, self._fail)

    def _recv(self, stage: int, key: Key) -> Any:
        worker = self._worker_of[stage]
        self.awaiting[worker] = key
        message = self.transport.recv(stage, key)
        self.awaiting[worker] = None
        return message
