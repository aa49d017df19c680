"""Runs mini-batches on the stages of a pipeline, one at a time: whole steps, forwards alone and backwards alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from ..autograd import graph_cut
from .emulation import DeviceEmulation
from .engine import Engine
from .loss_sink import LossSink, OutputSink
from .observe.recorder import Recorder
from .observe.trace import Traces
from .order import Order, Orders
from .stage import Stage
from .state.batch_norm import DeferredBatchNorm
from .step import Step
from .transport.cuda import Streams, any_pinned


class Runner:
    """Runs the steps, forwards and backwards of one pipeline.

    Args:
        engine: has the workers.
        stages: all stages.
        orders: the orders of actions.
        traces: record the runs while a trace is open.
        batch_norms: BatchNorm layers whose statistics are updated once per run.
        streams: the streams of the workers, if any device is an accelerator.
        emulation: of virtual devices, if they are emulated.
    """

    def __init__(
        self,
        engine: Engine,
        stages: Sequence[Stage],
        orders: Orders,
        traces: Traces,
        batch_norms: DeferredBatchNorm,
        streams: Streams | None,
        emulation: DeviceEmulation | None,
    ) -> None:
        self._engine = engine
        self._stages = stages
        self._orders = orders
        self._traces = traces
        self._batch_norms = batch_norms
        self._streams = streams
        self._emulation = emulation
        self._lock = threading.Lock()
        self._claim: object | None = None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Give the calling thread exclusive use of the stages within the block.

        Raises:
            RuntimeError: the pipeline is closed, or another thread has them.
        """
        self._engine.check_open()
        claim = object()
        try:  # before the claim: an interrupt may come between any two instructions
            with self._lock:
                self._claim = self._claim or claim
            if self._claim is not claim:
                raise RuntimeError("the pipeline is busy: another thread, or a layer inside it, is in a step")
            with self._batch_norms.gathering():
                yield
        finally:
            if self._claim is claim:
                self._claim = None

    def new_step(
        self,
        order: Order,
        inputs: Sequence[Any],
        sink: LossSink,
        forward: Step | None = None,
        recorder: Recorder | None = None,
        optimizers: Sequence[Optimizer | None] = (),
        targets: Any = (),
    ) -> Step:
        """Create a step of these actions, which is executed later."""
        return Step(
            order,
            self._stages,
            inputs,
            sink,
            forward=forward,
            optimizers=optimizers,
            recorder=recorder,
            streams=self._streams,
            reads_pinned=self._streams is not None and any_pinned((inputs, targets)),
            emulation=self._emulation,
        )

    def forwards(self, inputs: Sequence[Any], sink: LossSink) -> Step:
        """Run all forwards of a mini-batch."""
        order = self._orders.forwards(len(inputs))
        recorder = self._traces.recorder(order.schedule, self._stages)
        step = self.new_step(order, inputs, sink, recorder=recorder)
        self._engine.execute(step)
        self._traces.add_forward(recorder)
        return step

    def forwards_for_caller(self, inputs: Sequence[Any], sink: OutputSink) -> Step:
        """Run all forwards of a mini-batch and give the outputs to the caller."""
        with self.claimed():
            step = self.forwards(inputs, sink)
            self.hold_for_caller(sink.outputs)
        return step

    def backwards(self, forward: Step, sink: OutputSink) -> Sequence[graph_cut.Gradients]:
        """Run the backwards of such forwards; return the gradients of the inputs, one entry per micro-batch."""
        with self.claimed():
            parts = len(forward.input_gradients)
            step = self.new_step(self._orders.backwards(parts), [None] * parts, sink, forward)
            if all(stage.device.type == "cpu" for stage in self._stages):
                self._engine.execute(step)
            else:
                self._engine.execute_here(step)
        return step.input_gradients

    def hold_for_caller(self, outputs: Any) -> None:
        """Keep the memory of outputs until the caller's streams have read them."""
        if self._streams:
            self._streams.hold_for_caller(outputs)
