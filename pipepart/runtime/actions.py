"""StageActions: the functions that run the actions of one stage; each receives inputs, computes, and sends results.

::

    worker of device 0                      worker of device 1
    F(0, 3) ── output under (F, 1, 3) ─────▶ recv, F(1, 3), loss
    recv, B(0, 3) ◀── gradients under (B, 0, 3) ── B(1, 3)

A message is keyed by the action that receives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.optim import Optimizer

from schedules import Kind, Schedule

from ..autograd import graph_cut
from .offload import CopyQueue
from .sinks import LossSink
from .stage_run import StageRun
from .transport.reductions import Reductions
from .transport.threads import Key, Transport

Act = Callable[[Any], None]  # runs the action of a micro-batch; None stands for all micro-batches
Compute = Callable[[Any, Any], Any]  # maps a micro-batch and what was received to what is sent
Around = Callable[[Kind, StageRun, Compute], Compute]  # adds to a computation, such as taking its times


class Emulation(Protocol):
    """What emulates the devices of a pipeline: their memories, speeds and links."""

    def begin(self, optimizers: Sequence[Optimizer | None]) -> None:
        """Before a run, on the caller's thread."""
        ...

    def transport(self, inner: Transport, schedule: Schedule) -> Transport:
        """Return the transport of one run."""
        ...

    def around(self, kind: Kind, run: StageRun, compute: Compute) -> Compute:
        """Return the computation of a kind of action of a stage as its device runs it."""
        ...

    def copy_queue(self, worker: int, queue: CopyQueue) -> CopyQueue:
        """Return the copies between a worker's device and the host; ``queue`` copies at any speed."""
        ...


@dataclass
class Exchange:
    """What the stages of one step share: their messages, the inputs and the loss.

    Attributes:
        schedule, sink: of the step.
        inputs: the first stage's input for each micro-batch.
        transport: carries the messages.
        awaiting: for each worker the key of the message that it waits for.
        reductions: over replicas on other ranks, if there are any.
        input_gradients: of each micro-batch's input, once the step has ended.
    """

    schedule: Schedule
    sink: LossSink
    inputs: Sequence[Any]
    transport: Transport
    awaiting: list[Key | None]
    reductions: Reductions | None = None
    input_gradients: list[graph_cut.Gradients] = field(init=False)

    def __post_init__(self) -> None:
        self.input_gradients = [()] * self.schedule.micro_batches

    def forget(self) -> None:
        """Release all tensors."""
        self.inputs = ()
        self.input_gradients.clear()


class StageActions:
    """The actions of one stage in one step. The functions of :meth:`table` are called on the stage's worker.

    Args:
        run: the stage.
        exchange: of the step.
    """

    def __init__(self, run: StageRun, exchange: Exchange) -> None:
        self.run = run
        self._exchange = exchange
        self._stage = run.index
        self._is_first = exchange.schedule.previous_stage(run.index) is None
        self._send, self._recv = exchange.transport.send, exchange.transport.recv

    def table(self, kinds: Iterable[Kind], around: Sequence[Around] = ()) -> Mapping[Kind, Act]:
        """Return the functions for some kinds of actions; ``around`` wrap the computations, the last one outermost."""
        run = self.run
        every: dict[Kind, tuple[Callable[[Compute], Act], Compute]] = {
            Kind.F: (self._forward, run.forward),
            Kind.B: (self._backward, run.backward),
            Kind.I: (self._backward, run.backward_inputs),
            Kind.W: (_alone, run.backward_weights),
            Kind.RECOMPUTE: (_alone, run.recompute),
            Kind.OFFLOAD: (self._offload, run.offload),
            Kind.RELOAD: (_alone, run.reload),
            Kind.REDUCE_GRAD: (self._reduce, run.reduce),
            Kind.OPT_STEP: (_alone, run.update),
        }
        acts: dict[Kind, Act] = {}
        for kind in kinds:
            act_with, compute = every[kind]
            for wrap in around:
                compute = wrap(kind, run, compute)
            acts[kind] = act_with(compute)
        return acts

    def _forward(self, compute: Compute) -> Act:
        """Return the action that receives the input of the stage, and sends its output to the next one."""
        run, stage, following = self.run, self._stage, self._stage + 1
        send, recv, inputs = self._send, self._recv, self._exchange.inputs
        is_first, is_last, offloads = self._is_first, run.is_last, run.offloads

        def act(micro_batch: int) -> None:
            message = inputs[micro_batch] if is_first else recv(stage, (Kind.F, stage, micro_batch))
            message = compute(micro_batch, message)
            if not is_last:
                send(stage, following, (Kind.F, following, micro_batch), message)
            if offloads and (saved := run.saved_of(micro_batch)) is not None:
                saved.start_out(run.stashes[micro_batch].entered[0])

        return act

    def _backward(self, compute: Compute) -> Act:
        """Return the action that receives gradients of the output, and sends those of input and shared parameters."""
        run, stage, previous = self.run, self._stage, self._stage - 1
        send, recv, sink = self._send, self._recv, self._exchange.sink
        stashes, routes, input_gradients = run.stashes, run.routes, self._exchange.input_gradients
        is_first, is_last, offloads = self._is_first, run.is_last, run.offloads

        def act(micro_batch: int) -> None:
            if offloads and (saved := run.saved_of(micro_batch)) is not None:
                saved.wait()
            stash = stashes[micro_batch]
            gradients: graph_cut.Gradients = ()
            if stash.roots and is_last:
                gradients = sink.gradients(micro_batch)
            elif stash.roots:
                gradients = recv(stage, (Kind.B, stage, micro_batch))
            if stash.added:
                gradients = (*gradients, *sink.added_gradients(stage, micro_batch))
            if routes:
                gradients = self._with_shared(gradients, micro_batch)
            results = compute(micro_batch, gradients)
            for route in routes:
                if route.previous is not None:
                    key = route.number, route.previous, micro_batch
                    send(stage, route.previous, key, route.tensor.grad)
                    route.tensor.grad = None
            if is_first:
                input_gradients[micro_batch] = results
            elif results:
                send(stage, previous, (Kind.B, previous, micro_batch), results)

        return act

    def _with_shared(self, gradients: graph_cut.Gradients, micro_batch: int) -> graph_cut.Gradients:
        """Return gradients with those of shared parameters, which arrive from later stages."""
        run = self.run
        for route in run.routes:
            if route.following is not None:
                arrived = self._recv(self._stage, (route.number, self._stage, micro_batch))
                if arrived is not None:
                    run.add_root(micro_batch, route.tensor)
                    gradients = (*gradients, arrived)
        return gradients

    def _offload(self, compute: Compute) -> Act:
        """Return the action that waits until the stash is on the host, and frees it here."""
        run = self.run

        def act(micro_batch: int) -> None:
            if (saved := run.saved_of(micro_batch)) is not None:
                saved.wait()
            compute(micro_batch, None)

        return act

    def _reduce(self, compute: Compute) -> Act:
        """Return the action that adds up the gradients of all replicas in the first, wherever they are."""
        run, exchange, stage = self.run, self._exchange, self._stage
        schedule, replica, reductions = exchange.schedule, run.stage.replica, exchange.reductions
        apart = schedule.model_stages
        first, worker = stage % apart, schedule.device_of[stage]
        others = () if replica or reductions else range(stage + apart, schedule.stages, apart)

        def act(micro_batch: None) -> None:
            if reductions is not None:
                exchange.awaiting[worker] = Kind.REDUCE_GRAD, stage, 0
                reductions.add_up(worker, run.stage.shared)
                exchange.awaiting[worker] = None
            arrived = [self._recv(stage, (Kind.REDUCE_GRAD, stage, 0, other)) for other in others]
            gradients = compute(micro_batch, arrived)
            if replica:
                self._send(stage, first, (Kind.REDUCE_GRAD, first, 0, stage), gradients)

        return act


def _alone(compute: Compute) -> Act:
    """Return the action that computes without a message."""
    return lambda micro_batch: compute(micro_batch, None)
