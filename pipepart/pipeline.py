"""Pipeline: a model cut along a plan, ready to train."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor, nn

import schedules

from .autograd import graph_cut
from .capture import flatten
from .cluster import Cluster
from .data.arguments import Arguments, arguments_of_call, check_arguments
from .data.device_batch import Prefetched
from .data.prefetch import Passes, Prefetch, ToArguments
from .data.split import Splitter, gather
from .loss import Reduction, StepLoss, add_loss, check_loss_is_scalar
from .planning import Plan, warn_of_changes
from .planning.automatic import plan_for
from .runtime import (
    CompileOptions,
    DeferredBatchNorm,
    Engine,
    MemoryUse,
    OptimizerFactory,
    Orders,
    OutputEnd,
    StageOptimizers,
    Step,
    Streams,
    build_stages,
    check_optimizer,
    check_timeout,
    differentiable,
    emulation_of,
    frees_memory,
    gradients_kept,
    guard_stages,
    memory_of,
    step_end,
)
from .runtime.as_module import Wrapped
from .runtime.observe.trace import Trace, Traces
from .runtime.options import RunOptions

LossFunction = Callable[..., Any]  # a scalar tensor, or (sum, count)


class Pipeline(Wrapped):
    """A model whose stages train on several devices, one worker thread a device.

    The layers stay those of the user's model, so that an optimizer over ``parameters()``, a checkpoint and the names in
    it know nothing of stages. One thread at a time may call ``step`` or the pipeline itself.

    Where the plan has a stage recompute, its layers run twice for a micro-batch: to the same numbers, buffers and
    random draws, but Python code in them, such as a counter, a forward hook or a draw from numpy, runs twice, too.

    Where the plan has several copies of the model, on devices of their own or in opposite directions, ``model`` is the
    first of them. The others are deep copies, made here: they follow its values, modes and settings at every step, and
    their gradients are added to its parameters', copy after copy. Python code in layers runs in each copy on its own.

    Args:
        model: the ``nn.Sequential`` that the plan was made for; its layers are moved to their devices.
        plan: the cut and the schedule.
        loss_fn: called as ``loss_fn(output, target)`` on each micro-batch, or ``loss_fn(output)`` without a target;
            None for a model whose output is the loss. It is put together from means and sums, or returns
            ``(sum, count)``: the step's loss is then the sum of sums divided by the sum of counts.
        reduction: how the loss sums up its samples; None to take its own word, as torch's losses give it, or to find
            out: it is called on outputs without values, too, and on halves of micro-batches. A model that computes its
            own loss is taken for a mean over samples.
        split: how a mini-batch is split, where not along dimension 0 of all its tensors: called with
            ``(input, target)``, or ``(input, None)`` for a forward alone, and a number of parts; it returns that many
            pairs or fewer. They come in the order of the samples in the output.
        deferred_batch_norm: whether the running statistics of BatchNorm layers are those of the whole mini-batch,
            updated once a step. Else they are updated for each micro-batch, as in plain micro-batched training; by its
            own statistics each micro-batch is normalised in either case.
        trace: whether to keep the start and end of every action of a step in ``last_trace``.
        strict: whether virtual devices are as strict as others: each has tensors of its own and the memory that the
            plan grants it, messages are copied, and an operation on tensors of several raises. Others are anyway.
        optimizer: makes an optimizer of a stage's list of parameters; each stage then steps within :meth:`step` as
            soon as its last gradient is there. Its numbers are those of one over all if it treats each by itself.
        timeout: seconds that a step may go on without an action that ends on any device, as where a layer waits for
            what never comes. It is then given up by a TimeoutError that says who waits for whom; a layer that does not
            return has the pipeline closed. A backward of ``pipe(x)`` on accelerators is not watched.
        nan_guard: whether the first number of a step that is not finite raises FloatingPointError, which names layer,
            stage and micro-batch, and whether it is in the layer's output, the loss, the gradient of the layer's input
            or of a parameter: first in the order of plain training on the same micro-batches. It costs a pass over
            every output and gradient, and a wait for each device once a step. Under ``scaler``, where gradients
            overflow in the course of things, they are not looked at; nor is -inf in a mask, which has no gradient.
            Layers run one by one, not compiled.
        compile: True, or keywords for ``torch.compile``: consecutive layers of a stage are compiled together from the
            second step in a mode on. Those that draw, add losses or have hooks run by themselves, as the first step
            shows. Kernels round in their own way, and a split backward does all of compiled layers in its first part.

    Under ``pipedream`` and ``pipedream-2bw``, which want ``optimizer``, the numbers are *not* those of plain training:
    stages step within a step, after each micro-batch or after as many as stages, a mini-batch of their own, and each
    micro-batch keeps to the weights of its forward. At the end of :meth:`step` all stages have taken all steps.

    Raises:
        TypeError: ``model`` is no ``nn.Sequential``, ``optimizer`` makes none, or ``compile`` is no keywords.
        ValueError: the plan's layers are not the model's, layers in different stages write one buffer, the loss
            reduces nothing, there are to be several copies of a layer that cannot be copied, or the schedule changes
            weights within a step and there is no ``optimizer``, or stages share parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: LossFunction | None = None,
        *,
        reduction: Literal["mean", "sum"] | None = None,
        split: Splitter | None = None,
        deferred_batch_norm: bool = False,
        trace: bool = False,
        strict: bool = False,
        optimizer: OptimizerFactory | None = None,
        compile: CompileOptions = False,
        timeout: float | None = None,
        nan_guard: bool = False,
    ) -> None:
        if plan.edges:
            raise ValueError(
                f"the plan is for a model with branches ({len(plan.edges)} edges between layers), and a Pipeline runs "
                "chains of layers only so far; the plan can be printed, saved and simulated"
            )
        check_optimizer(optimizer, plan)
        check_timeout(timeout)
        self._plan = plan
        self._loss_fn = loss_fn
        self._loss = StepLoss(loss_fn, Reduction(reduction) if reduction else None)
        self._loss_checked = loss_fn is None
        self._split = split
        self._traces = Traces(plan, always=trace)
        self._stages = build_stages(model, plan, compile, strict)
        norms = flatten(model) if deferred_batch_norm else ()
        self._batch_norms = DeferredBatchNorm(norms, self._stages)
        self._first_layer = flatten(model)[0]
        self._known_forms: set[tuple[int, tuple[str, ...]]] = set()
        warn_of_changes(plan, model, stacklevel=2)
        super().__init__(model, StageOptimizers(optimizer, model, plan))
        self._emulation = emulation_of(plan, self._stages, loss_fn, strict)
        self._orders = Orders(plan, with_optimizers=optimizer is not None)
        self._streams = Streams.of([torch.device(d.torch_device or "cpu") for d in plan.workers])
        guard = guard_stages(self._stages) if nan_guard else None
        self._engine = Engine(plan, timeout, guard)
        self._passes = Passes()
        self._lock = threading.Lock()
        self._claim: object | None = None
        self._close = weakref.finalize(self, self._engine.close, "the pipeline is closed")

    @classmethod
    def auto(
        cls,
        model: nn.Module,
        sample: Any,
        *,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        devices: int | Sequence[torch.device | str] | Cluster = 2,
        schedule: str = "auto",
        micro_batches: int | Literal["auto"] = "auto",
        recompute: Literal["auto", "never", "except-last", "always"] = "auto",
        replicas: int | Literal["auto"] = 1,
        optimizer: str = "adam",
        split: Splitter | None = None,
        **options: Unpack[RunOptions],
    ) -> Pipeline:
        """Profiles ``model`` on ``sample``, plans, and makes the pipeline.

        Args:
            model: an ``nn.Sequential``.
            sample: a mini-batch, its tensors ``[samples, ...]``: the first argument of the model, a tuple of
                positional arguments, a dict of keyword arguments, or :class:`pipepart.Arguments`.
            target: what the loss compares with.
            loss_fn: as for :class:`Pipeline`.
            devices: a number (accelerators where there are as many, else virtual devices on the CPU), a list of
                torch devices, or a Cluster.
            schedule: a name, or ``"auto"`` for the best.
            micro_batches: parts of a mini-batch; ``"auto"`` measures as many as stages, twice and four times that.
            recompute: whether stages run their forwards again before the backward instead of keeping what they
                made; ``"auto"`` where the memory does not do else.
            replicas: copies of the model that train side by side; ``"auto"`` for the best number.
            optimizer: whose state the memory of a stage counts.
            split, options: as for :class:`Pipeline`; the profile is of layers that are not compiled.

        Raises:
            TypeError, ValueError: as :func:`pipepart.profile` and :func:`pipepart.plan` do.
        """
        made = plan_for(
            model,
            sample,
            target=target,
            loss_fn=loss_fn,
            devices=devices,
            schedule=schedule,
            micro_batches=micro_batches,
            recompute=recompute,
            replicas=replicas,
            optimizer=optimizer,
            split=split,
        )
        return cls(model, made, loss_fn, split=split, **options)

    @property
    def plan(self) -> Plan:
        """The plan that the model is cut along."""
        return self._plan

    @property
    def last_trace(self) -> schedules.Timeline | None:
        """Start and end of each action of the last step that was traced, in seconds; None before the first."""
        return self._traces.last

    def trace(self, *, memory: bool = False) -> AbstractContextManager[Trace]:
        """Measures the steps that run within ``with pipe.trace() as trace``, and holds them against the plan.

        With ``memory`` their ``peak_bytes`` is counted, too: what each device kept, which slows small layers down.
        """
        return self._traces.opened(memory)

    def memory(self) -> dict[str, MemoryUse]:
        """The bytes in use on each virtual device, and the most so far, by its name; what the caller makes apart.

        Raises:
            RuntimeError: nobody counts: the pipeline was made without ``strict``, or its devices are real.
        """
        return memory_of(self._emulation)

    @frees_memory
    def step(
        self, *args: Any, target: Any = None, scaler: torch.amp.GradScaler | None = None, **kwargs: Any
    ) -> Tensor:
        """Forward and backward of a mini-batch; gradients are added to each parameter's ``grad``.

        They are those of the loss of the whole mini-batch. It is split into the plan's micro-batches, or into as
        many as it has samples if these are fewer.

        Stages' own optimizers clear the gradients first, and apply them. Under an asynchronous schedule ``grad`` is
        that of the last optimizer step, and the loss the mean of those of all.

        Args:
            args, kwargs: the arguments of the model, their tensors ``[samples, ...]``. Tensors without dimensions and
                all that is none goes whole to every micro-batch, and so does what is marked as :class:`pipepart.Whole`.
            target: what the loss compares with, its tensors ``[samples, ...]``; never cut off from its samples.
            scaler: scales the gradients, as those of ``scaler.scale(loss).backward()`` are; what follows is plain:
                ``scaler.unscale_(optimizer)``, clipping, ``scaler.step(optimizer)``, ``scaler.update()``.

        Returns:
            The loss of the mini-batch, a scalar without gradient and not scaled.

        Raises:
            TypeError, ValueError: bad arguments, before anything has run.
            RuntimeError: the pipeline is closed or busy.
            BaseException: what a layer or the loss raises, with notes that name stage, layer and micro-batch; the
                gradients are incomplete then, and the next step works. Of stages with own optimizers each has the
                newest weights that it made, some after more steps than others: go on from a checkpoint.
        """
        value = self._input(arguments_of_call(args, kwargs), target)
        with torch.inference_mode(False), torch.enable_grad():
            batch = Prefetched.parts_of(value, target, self._plan.micro_batches, self._split)
        if not self._loss_checked and self._loss_fn is not None:
            check_loss_is_scalar(self._loss_fn, self._plan.outputs, batch.targets[0], batch.sizes[0])
            self._loss_checked = True
        if scaler is not None:
            self._optimizers.refuse("a scaler")
            # Its first use makes the scale, for all workers: on the caller's streams, for which theirs wait.
            scaler.scale(torch.ones((), device=self._stages[len(self._plan.stages) - 1].device))
        with self._claimed(), torch.inference_mode(False), torch.enable_grad():
            order = self._orders.step(len(batch.inputs))
            end = step_end(self._loss, batch, order.schedule, scaler)
            messages = [graph_cut.part(one) for one in batch.inputs]
            self._optimizers.zero_grad()
            recorder = self._traces.recorder(order.schedule, self._stages, (messages, batch.targets))
            step = Step(
                order,
                self._stages,
                messages,
                end,
                optimizers=self._optimizers.by_stage,
                recorder=recorder,
                streams=self._streams,
                emulation=self._emulation,
            )
            self._engine.execute(step, scaled=scaler is not None)
            # All at once: the parts may share a graph of the caller's, which can be used only once.
            graph_cut.backward(
                [root for one in batch.inputs for root in graph_cut.cut(one)[1]],
                graph_cut.gradients_home(
                    (gradient for gradients in step.input_gradients for gradient in gradients),
                    (leaf.device for one in batch.inputs for leaf in graph_cut.leaves(one)),
                ),
            )
        self._traces.add_step(recorder)
        return end.total

    @frees_memory
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a mini-batch, computed micro-batch by micro-batch.

        With gradients enabled it can be differentiated, once: its backward runs all stages' backwards, after all
        forwards, and adds to the ``grad`` of the parameters, which the graph itself does not show. So
        ``torch.autograd.grad`` and ``backward(inputs=...)`` find what the input is made of and no parameter.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`step`.
        """
        value = self._input(arguments_of_call(args, kwargs))
        batch = Prefetched.parts_of(value, None, self._plan.micro_batches, self._split)
        if torch.is_grad_enabled():
            return differentiable(
                batch.inputs, batch.sizes, self._forward, self._backward, (s.device for s in self._stages)
            )
        end = OutputEnd(batch.sizes)
        self._forward([graph_cut.part(one) for one in batch.inputs], end)
        if (added := end.added.total()) is not None:
            add_loss(added, reduction="sum")
        return gather(end.outputs)

    def prefetch(
        self, loader: Iterable[Any], *, depth: int = 2, to_arguments: ToArguments | None = None
    ) -> Prefetch:
        """The mini-batches of any loader, made ready on a thread: ``for x, y in pipe.prefetch(loader)``.

        ``depth`` and ``to_arguments`` are those of :class:`pipepart.data.prefetch.Prefetch`. Closing ends its threads.
        """
        return Prefetch(loader, self._plan, self._split, self._passes, depth, to_arguments)

    def close(self) -> None:
        """Ends the worker threads. The model stays usable, the pipeline does not. Closing twice does nothing.

        A step that another thread is in, or the layer that calls this, goes on to its end and is the last.
        """
        self._passes.end("the pipeline is closed")
        self._close()
        self._engine.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._engine.closed else f"{len(self._plan.stages)} stages"
        label = ", asynchronous: not the numbers of plain training" if self._plan.asynchronous else ""
        return f"<Pipeline of {type(self._model).__name__}, {state}, {self._plan.schedule}{label}>"

    def _input(self, given: Arguments, target: Any = None) -> Any:
        """What is split into micro-batches, if the first layer takes these arguments."""
        form = len(given.args), tuple(given.kwargs)
        if form not in self._known_forms:
            check_arguments(*self._first_layer, given, target)
            self._known_forms.add(form)
        return given.input

    def _forward(self, inputs: Sequence[Any], end: OutputEnd) -> Step:
        with self._claimed():
            order = self._orders.forwards(len(inputs))
            recorder = self._traces.recorder(order.schedule, self._stages)
            streams, emulation = self._streams, self._emulation
            step = Step(
                order, self._stages, inputs, end, recorder=recorder, streams=streams, emulation=emulation
            )
            self._engine.execute(step)
            self._traces.add_forward(recorder)
            if self._streams:
                self._streams.hold_for_caller(end.outputs)
        return step

    def _backward(self, forward: Step, end: OutputEnd, parameters: bool) -> Sequence[graph_cut.Gradients]:
        with self._claimed(), nullcontext() if parameters else gradients_kept(self.parameters()):
            parts = len(forward.input_gradients)
            order = self._orders.backwards(parts)
            streams, emulation = self._streams, self._emulation
            nothing = [None] * parts
            step = Step(
                order, self._stages, nothing, end, forward=forward, streams=streams, emulation=emulation
            )
            if all(stage.device.type == "cpu" for stage in self._stages):
                self._engine.execute(step)
            else:
                self._engine.execute_here(step)
        return step.input_gradients

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """The pipeline for this thread alone.

        Raises:
            RuntimeError: another thread has it.
        """
        self._engine.check_open()
        claim = object()
        try:  # from before the claim on: an interrupt may come between any two instructions
            with self._lock:
                self._claim = self._claim or claim
            if self._claim is not claim:
                raise RuntimeError("the pipeline is busy: another thread, or a layer inside it, is in a step")
            with self._batch_norms.gathering():
                yield
        finally:
            if self._claim is claim:
                self._claim = None
