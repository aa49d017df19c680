"""Calls: the part of a pipeline that runs mini-batches: training steps, evaluation, and the forward alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import schedules

from .as_module import AsModule
from .autograd import graph_cut
from .autograd.own_copy import tensors
from .capture import Chain
from .data.gather import Merger
from .data.recorded import entered, gathered
from .data.split import Batching, MicroBatches
from .differentiable import differentiable
from .distributed import SingleProcess
from .distributed.single_process import Agreed, Call
from .emulation import DeviceEmulation, MemoryUse
from .loss import LossError, Reduction, StepLoss, add_loss, collecting
from .planning import Plan
from .runtime.engine import Engine
from .runtime.failure.out_of_memory import public_call
from .runtime.observe.recorder import Recorder
from .runtime.observe.trace import Trace, Traces
from .runtime.order import Orders
from .runtime.sinks import BatchLossSink, MicroBatchLossSink, OutputSink, loss_of_outputs, make_loss_sink
from .runtime.stage import Stage
from .runtime.step_gradients import StepGradients
from .workers.streams import hold_for_caller


class Calls(AsModule):
    """Training, evaluation and forwards of a pipeline. A subclass sets the attributes.

    All calls go the same way: the processes agree on the micro-batches, if there are several; the engine runs a step
    on all workers; a sink takes the outputs of the last stage and computes the loss.
    """

    _plan: Plan
    _chain: Chain
    _loss: StepLoss
    _merge: Merger | None
    _side: SingleProcess
    _stages: list[Stage]
    _batching: Batching
    _orders: Orders
    _engine: Engine
    _traces: Traces
    _emulation: DeviceEmulation | None

    @public_call
    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        loss_weight: float = 1.0,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of a mini-batch; add the gradients of its loss to each parameter's ``grad``.

        The mini-batch is split into as many micro-batches as the plan has, or fewer if it has fewer samples. With
        BatchNorm in training each has at least two. A model in evaluation mode trains in that mode.

        With ``optimizer=``, the optimizers of the stages clear the gradients first and step at the end. Under an
        asynchronous schedule ``grad`` is the gradient of the last optimizer step, and the loss is the mean over all
        optimizer steps.

        Args:
            args, kwargs: the arguments of the model, their tensors ``[samples, ...]``. Tensors without dimensions,
                other values and values marked as :class:`pipepart.Whole` are replicated to every micro-batch.
            target: the target of the loss, its tensors ``[samples, ...]``.
            scaler: scales the gradients as ``scaler.scale(loss).backward()`` does. Go on as in a plain loop:
                ``scaler.unscale_(optimizer)``, clipping, ``scaler.step(optimizer)``, ``scaler.update()``.
            loss_weight: multiplies the gradients: ``1 / k`` for one of ``k`` mini-batches whose gradients make up one
                step of the optimizer. Not the loss that is returned.
            return_outputs: return the output of the model as well.

        Returns:
            The loss of the mini-batch, a scalar without gradient, neither scaled nor weighted; or ``(loss, output)``.

        Raises:
            TypeError, ValueError: an argument is wrong, and nothing has run; or the outputs cannot be joined.
            RuntimeError: gradients are disabled, the pipeline is closed or busy, or a layer of the model was replaced.
            BaseException: what a layer or the loss raises, with notes that name stage, layer and micro-batch. The
                gradients are incomplete; the next step works. Optimizers of stages may have taken unequal numbers of
                steps: go on from a checkpoint.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step trains, and gradients are disabled here (torch.no_grad or torch.inference_mode): for the loss "
                "alone call pipe.evaluate(...), or leave that block to train"
            )
        options = f"(scaler={scaler is not None}, {loss_weight=}, {return_outputs=})"
        agreed = self._agreed("step", args, kwargs, target, options)
        if scaler is not None:
            self._optimizers.refuse("a scaler")
            # The first use of a scaler creates its scale: here, on the caller's streams, which the workers wait for.
            last = self._device_here(len(self._plan.stages) - 1) or self._engine.devices[-1]
            scaler.scale(torch.ones((), device=last))
        run = partial(self._trained, agreed, scaler, loss_weight, return_outputs)
        sink, recorder = self._engine.exclusively(run)
        self._traces.add_step(recorder)
        if not sink.trains and any(parameter.requires_grad for parameter in self._model.parameters()):
            raise LossError("nothing was trained: the output of the model has no gradient, is it detached?")
        return (sink.total, self._output(sink, agreed.batch)) if return_outputs else sink.total

    def _trained(
        self, agreed: Agreed, scaler: torch.amp.GradScaler | None, loss_weight: float, keep_outputs: bool
    ) -> tuple[MicroBatchLossSink | BatchLossSink, Recorder | None]:
        """Run forwards and backwards of a mini-batch, then the backward of the graph that computed it, if any."""
        batch, form, seed, _ = agreed
        order = self._orders.step(len(batch.inputs))
        batch = self._engine.pinned.with_targets(
            order.schedule, batch, self._loss.reduction is Reduction.BATCH
        )
        optimizers = self._optimizers.by_stage
        # Optimizers of stages clear and use their gradients within the step.
        gradients = StepGradients(lambda: () if optimizers else self.parameters())
        sink = make_loss_sink(
            self._loss,
            batch,
            order.schedule,
            scaler,
            self._side.before_backward(gradients, bool(optimizers), len(batch.inputs)),
            self._merge,
            keep_outputs,
            loss_weight=loss_weight,
            shared_out=self._side.shares_out,
        )
        messages = [graph_cut.part(each) for each in batch.inputs]
        self._optimizers.zero_grad()
        recorder = self._traces.recorder(order.schedule, self._stages)
        step = self._engine.new_step(order, messages, sink, None, recorder, optimizers, form, seed)
        try:
            self._engine.execute(step)
            self._side.end(step, scaled=scaler is not None)
            factor = sink.correction()
            gradients.finish(factor)
        except LossError:
            gradients.take_back()
            raise
        graph_cut.backward_of_caller(batch.inputs, self._side.input_gradients(step, batch, factor))
        return sink, recorder

    @public_call
    def evaluate(self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss of a mini-batch in evaluation mode. Changes no gradient, mode or running statistic.

        Args:
            args, kwargs, target, return_outputs: as for :meth:`step`.

        Returns:
            The loss of the mini-batch, a scalar; or ``(loss, output)``.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`step`.
        """

        def run() -> Any:
            batch, form, seed, _ = self._agreed("evaluate", args, kwargs, target, f"({return_outputs=})")
            order = self._orders.forwards(len(batch.inputs))
            batch = self._engine.pinned.with_targets(
                order.schedule, batch, self._loss.reduction is Reduction.BATCH
            )
            sink = make_loss_sink(
                self._loss,
                batch,
                order.schedule,
                merge=self._merge,
                keep_outputs=return_outputs,
                shared_out=self._side.shares_out,
            )
            step = self._engine.forwards([graph_cut.part(each) for each in batch.inputs], sink, form, seed)
            self._side.end(step)
            return (sink.total, self._output(sink, batch)) if return_outputs else sink.total

        with torch.inference_mode(False), torch.no_grad():
            return self._engine.exclusively(lambda: self._evaluating(run))

    @public_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a mini-batch, computed micro-batch by micro-batch.

        With gradients enabled the output can be differentiated once: its backward runs the backwards of all stages,
        after all forwards, and adds to the ``grad`` of the parameters. The parameters are not in the graph of the
        output, so ``torch.autograd.grad`` and ``backward(inputs=...)`` reach the arguments of the model only.

        Under torchrun every rank gets the output, computes the same loss from it, and calls ``backward``.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`step`.
        """
        agreed = self._agreed("forward", args, kwargs, options="(collect_losses=True)" * collecting())
        batch, form, seed, _ = agreed
        if torch.is_grad_enabled():
            recomputes = any(stage.recompute != "never" for stage in self._plan.stages)
            parameters = dict(self.named_parameters())
            outputs = differentiable(self._engine, agreed, parameters, recomputes, self._side)
            return gathered(outputs, batch, self._merge, loss_of_outputs(self._loss, outputs, batch))
        sink = OutputSink(batch.sizes)
        step = self._engine.forwards_for_caller(
            [graph_cut.part(each) for each in batch.inputs], sink, form, seed
        )
        self._side.end(step)
        self._side.collect(sink.outputs, batch.inputs)
        if (added := sink.added_total()) is not None:
            add_loss(added, reduction="sum")
        return self._side.from_last(
            lambda: gathered(
                sink.outputs, batch, self._merge, loss_of_outputs(self._loss, sink.outputs, batch)
            )
        )

    @property
    def last_trace(self) -> schedules.Timeline | None:
        """Start and end of each action of the last step that was traced, in seconds; None before the first."""
        return self._traces.last

    @contextmanager
    def trace(self, *, memory: bool = False) -> Iterator[Trace]:
        """Record the steps that run within ``with pipe.trace() as trace``, to compare them with the plan.

        With ``memory``, ``trace.memory_bytes`` has the peak of each device, if the pipeline is strict.
        """
        emulation = self._emulation if memory else None
        if emulation:
            emulation.reset_peaks()
        with self._traces.opened() as trace:
            try:
                yield trace
            finally:
                used = emulation.memory() if emulation else {}
                trace.memory_bytes = {name: use.peak for name, use in used.items()}

    def memory(self) -> dict[str, MemoryUse]:
        """Bytes in use and their peak on each virtual device, by device name, without the caller's own tensors.

        Under torchrun, only the devices of this rank are included.

        Raises:
            RuntimeError: the pipeline is not ``strict``, or its devices are real.
        """
        used = self._emulation.memory() if self._emulation else {}
        if not used:
            raise RuntimeError(
                "memory is counted on virtual devices whose pipeline is made with strict=True: "
                "Pipeline(model, plan, ..., strict=True); accelerators count theirs themselves"
            )
        return used

    def _device_here(self, stage: int) -> torch.device | None:
        """Return the device of a stage; None if that belongs to another rank, which alone may use it."""
        is_here = self._side.stages is None or stage in self._side.stages
        return self._stages[stage].device if is_here else None

    def _agreed(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, options: str = ""
    ) -> Agreed:
        """Return the micro-batches of a call; check that the pipeline is open and its layers are unchanged."""
        self._engine.check_free()
        self.check_layers()

        def parts() -> MicroBatches:
            return entered(self._chain, self._batching.parts(args, kwargs, target))

        call += " with a trace" if self._traces.wanted else ""
        return self._side.begin(Call(call, args, kwargs, target, parts, options))

    def _output(self, sink: MicroBatchLossSink | BatchLossSink, batch: MicroBatches) -> Any:
        hold_for_caller(tensors(sink.outputs))
        self._side.collect(sink.outputs, batch.inputs)
        with torch.no_grad():
            return self._side.from_last(lambda: gathered(sink.outputs, batch, self._merge, sink.total))
