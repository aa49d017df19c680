"""Pipeline: a model cut along a plan, ready to train."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .autograd import graph_cut
from .capture import Chain, RecordedChain, Verify, Whole, chain_of, loss_of
from .checkpoint import finish
from .cluster import Cluster
from .data.copy_ahead import CopyAhead
from .data.gather import Merger
from .data.prefetch import Passes, Prefetch
from .data.recorded import entered, gathered
from .data.split import Batching, MicroBatches, Splitter
from .distributed import join, making, planned_once
from .input_error import InputError
from .loss import LossError, Reduction, StepLoss, add_loss, collecting
from .planning import Plan, warn_of_changes
from .planning.automatic import plan_for
from .planning.compression import Compress
from .ranks import Ranks, join_ranks, under_torchrun
from .runtime.agreed import Agreed, Call
from .runtime.as_module import AsModule
from .runtime.build import build_stages, guard_stages
from .runtime.compiled import CompileOptions
from .runtime.differentiable import differentiable
from .runtime.emulation import emulation_of
from .runtime.engine import Engine
from .runtime.failure.out_of_memory import frees_memory
from .runtime.observe.observed import Observed
from .runtime.observe.trace import Traces
from .runtime.options import RunOptions, check_functions, check_keywords, check_runs
from .runtime.order import Orders
from .runtime.placing import InitialValues
from .runtime.sinks import BatchLossSink, MicroBatchLossSink, OutputSink, loss_of_outputs, make_loss_sink
from .runtime.state.batch_norm import DeferredBatchNorm
from .runtime.state.optimizers import OptimizerFactory, StageOptimizers
from .runtime.step_gradients import StepGradients

LossFunction = Callable[..., Any]  # a scalar tensor, or (sum, count)


class Pipeline(AsModule, Observed):
    """Trains a model that is cut into stages. Each device has a worker thread.

    The layers stay those of the model: optimizers over ``parameters()`` and checkpoints work as without a pipeline.
    One thread at a time may use a pipeline.

    A stage that recomputes runs its layers twice for each micro-batch, to the same numbers; Python code in them, such
    as a counter or a forward hook, runs twice as well. With replicas, ``model`` is the first replica; the others are
    deep copies that follow its parameters, modes and settings at every step.

    Args:
        model: the module that the plan was made for. Its layers are moved to their devices. An ``nn.Sequential`` runs
            layer by layer. Any other module is recorded at its first call, and again for other shapes and modes.
        plan: the cut and the schedule.
        loss_fn: called as ``loss_fn(output, target)`` on each micro-batch, or as ``loss_fn(output)`` without a target.
            None for a model whose output is the loss. Returns a scalar, or ``(sum, count)``: the loss of the step is
            then the sum of all sums divided by the sum of all counts.
        reduction: ``"mean"`` or ``"sum"`` over samples, if the loss is not recognized; ``"batch"`` to call
            ``loss_fn`` once per step on the gathered output, which is right for any loss. None to detect it from the
            operations of the loss.
        split: splits a mini-batch in place of the rule that all tensors are split along dimension 0. Called with
            ``(input, target)``, or ``(input, None)`` for a forward alone, and a number of parts; returns that many
            pairs or fewer. The input is the argument of the model, or :class:`pipepart.Arguments` if it has several.
        merge: joins the outputs of the micro-batches in place of the rule that tensors are joined along dimension 0.
            Called with the list of outputs, in the order of the parts; returns the output of the mini-batch.
        deferred_batch_norm: update the running statistics of BatchNorm layers once a step, with those of the whole
            mini-batch. Otherwise each micro-batch updates them. Each micro-batch is normalized by its own statistics
            in both cases.
        trace: keep the start and end of every action of a step in ``last_trace``.
        strict: forbid mixing tensors of different virtual devices and enforce their memory limits, as real devices do.
        optimizer: a function from a list of parameters to an optimizer of torch; a class such as ``torch.optim.Adam``
            has its default settings. Each stage then has its own, which steps within :meth:`step` as soon as the last
            gradient of the stage is there.
        timeout: seconds after which a step in which no action ends fails with a TimeoutError that says which device
            waits for what. A backward of ``pipe(x)`` on accelerators has no timeout.
        nan_guard: raise FloatingPointError at the first number of a step that is not finite, with its layer, stage and
            micro-batch. Costs a pass over every output and gradient, and a wait for the devices once a step. Gradients
            under ``scaler`` are not checked. Layers are not compiled.
        varying_shapes: under torchrun, send the shapes of every message with it, for stages that pass tensors whose
            shapes depend on values. Otherwise they are sent once for each shape of the mini-batch.
        verify: compare the first replay of each recording of the model with the model itself, bit for bit
            (``"first"``), every replay (``"always"``) or none (``"never"``). Not used for an ``nn.Sequential``.
        weights: a file of safetensors, or a folder as ``save_pretrained`` writes it, with the model's state dict. None
            for the values that the model has, or that its construction under :func:`deferred_init` gives it.
        compile: True, or keywords for ``torch.compile``: consecutive layers of a stage are compiled together from the
            second step on, except layers that draw random numbers, add losses or have hooks. Rounding differs.

    Under ``pipedream`` and ``pipedream-2bw`` the numbers are *not* those of plain training: each stage steps its
    optimizer within a step, after every micro-batch or after as many as there are stages.

    Raises:
        TypeError: an argument has the wrong type.
        CaptureError: the model is on the meta device, and the initial values of a tensor are unknown.
        FileNotFoundError, ImportError: there are no such ``weights``, or safetensors is not installed.
        ValueError: ``weights`` are not those of the model, the plan was made for another model, layers in different
            stages write one buffer, the loss does not reduce, a layer cannot be copied for replicas, or the schedule
            needs ``optimizer`` or layers in different stages that share no parameters.
    """

    def __init__(
        self,
        model: nn.Module | Chain,
        plan: Plan,
        loss_fn: LossFunction | None = None,
        *,
        reduction: Literal["mean", "sum", "batch"] | None = None,
        split: Splitter | None = None,
        merge: Merger | None = None,
        deferred_batch_norm: bool = False,
        trace: bool = False,
        strict: bool = False,
        optimizer: OptimizerFactory | None = None,
        compile: CompileOptions = False,
        timeout: float | None = None,
        nan_guard: bool = False,
        varying_shapes: bool = False,
        verify: Verify = "first",
        weights: str | PathLike[str] | None = None,
    ) -> None:
        ranks = join_ranks(timeout)
        options = {
            "loss_fn": loss_fn,
            "reduction": reduction,
            "split": split,
            "merge": merge,
            "deferred_batch_norm": deferred_batch_norm,
            "trace": trace,
            "strict": strict,
            "optimizer": optimizer,
            "compile": compile,
            "timeout": timeout,
            "nan_guard": nan_guard,
            "varying_shapes": varying_shapes,
            "verify": verify,
        }
        with making(ranks, plan, model, options):
            check_runs(plan, reduction, optimizer, timeout)
            check_functions(loss_fn=loss_fn, split=split, merge=merge)
            self._plan = plan
            infos = plan.profile.layers if plan.profile is not None else ()
            self._chain = chain = chain_of(model, infos, verify=verify, split_loss=loss_fn is None)
            if not chain.layers:
                raise InputError(
                    f"the plan does not say what the layers of a {type(chain.model).__name__} are, which is no "
                    "nn.Sequential: make it with pipepart.plan(pipepart.profile(model, sample, ...), ...)"
                )
            self._loss = StepLoss(
                loss_fn
                or (loss_of if isinstance(chain, RecordedChain | Whole) and reduction != "batch" else None),
                Reduction(reduction) if reduction else None,
            )
            self._merge = merge
            self._traces = Traces(plan, always=trace)
            self._side = side = join(ranks, plan, chain, varying_shapes)
            if not side.has_whole and isinstance(chain, RecordedChain):
                chain.part()
            values = InitialValues.of(chain.model, weights)
            self._stages = build_stages(
                chain.layers,
                plan,
                compile,
                strict,
                values,
                side.stages,
                side.replica,
                side.copied,
            )
            self._batching = Batching(chain.entrance, chain.model.modules(), plan.micro_batches, split)
            warn_of_changes(plan, chain, stacklevel=2)
            super().__init__(side.part, chain.places, StageOptimizers(optimizer, chain, plan, side.stages))
            if nan_guard:
                guard_stages(self._stages, len(plan.stages))
            local = None if side.links is None else side.links.local
            self._emulation = emulation_of(plan, self._stages, loss_fn, strict, local)
            self._orders = Orders(plan, with_optimizers=optimizer is not None)
            self._passes = Passes()
            # Last of what can fail: it starts the workers.
            self._engine = Engine(
                plan,
                self._stages,
                self._orders,
                self._traces,
                DeferredBatchNorm(chain.layers if deferred_batch_norm else (), self._stages),
                self._emulation,
                timeout,
                side.links,
            )
        side.connect()

    @classmethod
    def auto(
        cls,
        model: nn.Module,
        sample: Any,
        *,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        layers: Sequence[str] | None = None,
        devices: int | Sequence[torch.device | str] | Cluster | None = None,
        schedule: str = "auto",
        micro_batches: int | Literal["auto"] = "auto",
        recompute: Literal["auto", "never", "except-last", "always"] = "auto",
        offload: Literal["auto", "never", "stash"] = "auto",
        replicas: int | Literal["auto"] = 1,
        compress: Compress = None,
        seconds: float | None = None,
        optimizer_state: str = "adam",
        split: Splitter | None = None,
        **options: Unpack[RunOptions],
    ) -> Pipeline:
        """Profile ``model`` on ``sample``, plan, and make the pipeline. On the meta device, costs are estimated.

        Under torchrun rank 0 profiles and plans for all.

        Args:
            model: any module.
            sample: a mini-batch, its tensors ``[samples, ...]``: the first argument of the model, a tuple of
                positional arguments, a dict of keyword arguments, or :class:`pipepart.Arguments`.
            target: the target of the loss, its tensors ``[samples, ...]``.
            loss_fn: as for :class:`Pipeline`.
            layers: paths of the modules that become layers, as for :func:`pipepart.profile`.
            devices: a number (accelerators if there are that many, else virtual devices on the CPU), a list of torch
                devices, or a Cluster. None for 2, or under torchrun for :meth:`Cluster.of_ranks`.
            schedule: a name, or ``"auto"`` for the fastest.
            micro_batches: parts of a mini-batch; ``"auto"`` measures as many as stages, twice and four times that.
            recompute, offload: which stages run their forward again in the backward, or keep their stash on the host
                until then; ``"auto"`` for those that do not fit into memory otherwise. See :func:`pipepart.plan`.
            replicas: copies of the model that train side by side; ``"auto"`` for the fastest number.
            compress: ``"bf16"`` or ``"int8"`` to send activations and gradients in fewer bytes between hosts, or
                between devices of one host. See :func:`pipepart.plan`.
            seconds: that the search for the plan may take, as for :func:`pipepart.plan`.
            optimizer_state: the optimizer whose state counts in the memory of a stage: ``"sgd"``, ``"momentum"``,
                ``"adam"`` or ``"adamw"``.
            split, options: as for :class:`Pipeline`.

        Raises:
            TypeError, ValueError: as :func:`pipepart.profile` and :func:`pipepart.plan` do.
        """
        check_keywords(options, inspect.signature(cls.auto).parameters)
        check_functions(loss_fn=loss_fn, split=split)

        def check() -> None:  # before anything is measured
            if isinstance(model, nn.Module):
                InitialValues.of(model, options.get("weights"))

        same: dict[str, Any] = {
            "layers": layers,
            "schedule": schedule,
            "micro_batches": micro_batches,
            "recompute": recompute,
            "offload": offload,
            "replicas": replicas,
            "compress": compress,
            "seconds": seconds,
            "optimizer_state": optimizer_state,
        }
        make = partial(
            plan_for,
            model,
            sample,
            **same,
            target=target,
            loss_fn=loss_fn,
            devices=devices if devices is not None else Cluster.of_ranks() if under_torchrun() else 2,
            split=split,
            with_optimizers=options.get("optimizer") is not None,
            reduction=options.get("reduction"),
            all_devices=under_torchrun(),
        )
        made = planned_once(check, make, same)
        return cls(model, made, loss_fn, split=split, **options)

    @property
    def plan(self) -> Plan:
        """The plan that the model is cut along."""
        return self._plan

    @property
    def mesh(self) -> DeviceMesh | None:
        """Under torchrun with replicas, the ranks by replica ("dp") and place in it ("pp"); otherwise None."""
        return self._side.mesh

    @frees_memory
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
            TypeError, ValueError: wrong arguments; nothing has run. Or the outputs cannot be joined.
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
        batch, form, seed, _ = self._agreed("step", args, kwargs, target, options)
        if scaler is not None:
            self._optimizers.refuse("a scaler")
            # Its first use makes the scale, for all workers: on the caller's streams, for which theirs wait.
            scaler.scale(torch.ones((), device=self._stages[len(self._plan.stages) - 1].device))
        with self._engine.claimed():
            order = self._orders.step(len(batch.inputs))
            optimizers = self._optimizers.by_stage
            # Without those that the optimizers of the stages update.
            gradients = StepGradients(lambda: () if optimizers else self.parameters())
            sink = make_loss_sink(
                self._loss,
                batch,
                order.schedule,
                scaler,
                self._side.before_backward(gradients, bool(optimizers), len(batch.inputs)),
                self._merge,
                return_outputs,
                loss_weight=loss_weight,
                shared_out=self._side.shares_out,
            )
            messages = [graph_cut.part(one) for one in batch.inputs]
            self._optimizers.zero_grad()
            recorder = self._traces.recorder(order.schedule, self._stages, (messages, batch.targets))
            step = self._engine.new_step(
                order, messages, sink, None, recorder, optimizers, batch.targets, form, seed
            )
            try:
                self._engine.execute(step, scaled=scaler is not None)
                self._side.end(step, scaled=scaler is not None)
                factor = sink.correction()
                gradients.finish(factor)
            except LossError:
                gradients.take_back()
                raise
            graph_cut.backward_of_caller(batch.inputs, self._side.input_gradients(step, batch, factor))
        self._traces.add_step(recorder)
        if not sink.trains and any(parameter.requires_grad for parameter in self._model.parameters()):
            raise LossError("nothing was trained: the output of the model has no gradient, is it detached?")
        return (sink.total, self._output(sink, batch)) if return_outputs else sink.total

    @frees_memory
    def evaluate(self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss of a mini-batch in evaluation mode. Changes no gradient, mode or running statistic.

        Args:
            args, kwargs, target, return_outputs: as for :meth:`step`.

        Returns:
            The loss of the mini-batch, a scalar; or ``(loss, output)``.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`step`.
        """
        with torch.inference_mode(False), torch.no_grad(), self._engine.claimed(), self.evaluating():
            batch, form, seed, _ = self._agreed("evaluate", args, kwargs, target, f"({return_outputs=})")
            order = self._orders.forwards(len(batch.inputs))
            sink = make_loss_sink(
                self._loss,
                batch,
                order.schedule,
                merge=self._merge,
                keep_outputs=return_outputs,
                shared_out=self._side.shares_out,
            )
            step = self._engine.forwards([graph_cut.part(one) for one in batch.inputs], sink, form, seed)
            self._side.end(step)
            return (sink.total, self._output(sink, batch)) if return_outputs else sink.total

    @frees_memory
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a mini-batch, computed micro-batch by micro-batch.

        With gradients enabled the output can be differentiated once: its backward runs the backwards of all stages,
        after all forwards, and adds to the ``grad`` of the parameters. The parameters are not in the graph of the
        output, so ``torch.autograd.grad`` and ``backward(inputs=...)`` reach the arguments of the model only.

        Under torchrun every rank gets the output, computes the same loss of it, and goes backward.

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
            [graph_cut.part(one) for one in batch.inputs], sink, form, seed
        )
        self._side.end(step)
        self._side.collect(sink.outputs, batch)
        if (added := sink.added_total()) is not None:
            add_loss(added, reduction="sum")
        return self._side.from_last(
            lambda: gathered(
                sink.outputs, batch, self._merge, loss_of_outputs(self._loss, sink.outputs, batch)
            )
        )

    def prefetch(self, loader: Iterable[Any], *, depth: int = 2, target: int | str | None = None) -> Prefetch:
        """Load mini-batches and copy them to their devices on a thread: ``for x, y in pipe.prefetch(loader)``.

        Yields what the loader yields. Inputs are copied to the device of the first stage, targets to that of the last.

        Args:
            loader: any iterable of mini-batches.
            depth: mini-batches that are loaded ahead, at most.
            target: index or key of the target in a mini-batch, by default the last entry of a tuple or list.
        """
        first, last = self._stages[0].device, self._stages[len(self._plan.stages) - 1].device
        return Prefetch(loader, CopyAhead(first, last, target), self._passes, depth)

    def meet(self, call: str) -> Ranks | None:
        """Return the processes of the pipeline, all of which make the call of this name now; None for one process.

        For what needs all ranks beside the steps, as :func:`pipepart.save` does.

        Raises:
            RuntimeError: another rank makes another call, has failed, or is lost.
        """
        return self._side.meet(call)

    def close(self) -> None:
        """End the worker threads. The model stays usable, the pipeline does not. Closing twice does nothing.

        A step that is running, in another thread or in the layer that calls this, is finished first, and so is a
        checkpoint that is written in the background.

        Raises:
            BaseException: what went wrong with that checkpoint, if nothing has raised it yet.
        """
        self._passes.end("the pipeline is closed")
        self._engine.close("the pipeline is closed")
        self._engine.join()
        finish(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        why = self._engine.closed
        state = f"closed ({why})" if why else f"{len(self._plan.stages)} stages"
        label = ", asynchronous: not the numbers of plain training" if self._plan.asynchronous else ""
        label += f", {self._plan.compressed}" if self._plan.compressed else ""
        return f"<Pipeline of {type(self._model).__name__}, {state}, {self._plan.schedule}{label}>"

    def _agreed(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, options: str = ""
    ) -> Agreed:
        """Return the micro-batches of a call; check that the pipeline is open and its layers are unchanged."""
        self._engine.check_open()
        self.check_layers()

        def parts(*call: Any) -> MicroBatches:
            return entered(self._chain, self._batching.parts(*call))

        call += " with a trace" if self._traces.wanted else ""
        return self._side.begin(Call(call, args, kwargs, target, parts, options))

    def _output(self, sink: MicroBatchLossSink | BatchLossSink, batch: MicroBatches) -> Any:
        self._engine.hold_for_caller(sink.outputs)
        self._side.collect(sink.outputs, batch)
        with torch.no_grad():
            return self._side.from_last(lambda: gathered(sink.outputs, batch, self._merge, sink.total))
