"""Pipeline: a model cut into stages by a plan, ready to train."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .automatic import plan_for
from .calls import Calls
from .capture import Chain, RecordedChain, Verify, Whole, chain_of, loss_of
from .cluster import Cluster
from .data.gather import Merger
from .data.split import Batching, Splitter
from .distributed import check_parallelize, join, making, planned_once
from .emulation import emulation_of
from .input_error import InputError
from .loss import Reduction, StepLoss
from .options import RunOptions, check_functions, check_keywords, check_runs
from .planning import Plan, warn_of_changes
from .planning.compression import Compress
from .profiling import Parallelize
from .ranks import Ranks, join_ranks, under_torchrun
from .runtime.build import build_stages
from .runtime.compiled import CompileOptions
from .runtime.engine import Engine
from .runtime.observe.trace import Traces
from .runtime.order import Orders
from .runtime.placing import Initialize, InitialValues
from .runtime.state.optimizers import OptimizerFactory, StageOptimizers

LossFunction = Callable[..., Any]  # a scalar tensor, or (sum, count)


class Pipeline(Calls):
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
        trace: keep the start and end of every action of a step in ``last_trace``.
        strict: forbid mixing tensors of different virtual devices and enforce their memory limits, as real devices do.
            Under torchrun, also refuse mini-batches whose values differ between ranks.
        optimizer: a function from a list of parameters to an optimizer of torch; a class such as ``torch.optim.Adam``
            has its default settings. Each stage then has its own, which steps within :meth:`step` as soon as the last
            gradient of the stage is there.
        timeout: seconds after which a step in which no action ends fails with a TimeoutError that says which device
            waits for what. A backward of ``pipe(x)`` on accelerators has no timeout.
        verify: compare the first replay of each recording of the model with the model itself, bit for bit
            (``"first"``), every replay (``"always"``) or none (``"never"``). Not used for an ``nn.Sequential``.
        weights: a file of safetensors, or a folder as ``save_pretrained`` writes it, with the model's state dict. None
            for the values that the model has, or that ``initialize`` gives it.
        initialize: for a model whose parameters are on the meta device, a function that initializes the tensors of one
            module in place. It is called with each module that this process has, after its children, as by
            ``model.apply(initialize)``. A model of transformers has one: ``model._init_weights``.
        parallelize: under torchrun, a function of the layers of this process and their mesh that applies FSDP2 or
            tensor parallelism to them in place. ``layers`` maps names in the model to modules; ``mesh`` has the
            dimensions ``"dp"`` (replicas) and, if the plan has ``tensor`` above 1, ``"tp"``. For example::

                def parallelize(layers, mesh):
                    for layer in layers.values():
                        fully_shard(layer, mesh=mesh["dp"])

        compile: True, or keywords for ``torch.compile``: consecutive layers of a stage are compiled together from the
            second step on, except layers that draw random numbers, add losses or have hooks. Rounding differs.

    Under ``pipedream`` and ``pipedream-2bw`` the numbers are *not* those of plain training: each stage steps its
    optimizer within a step, after every micro-batch or after as many as there are stages.

    Raises:
        TypeError: an argument has the wrong type.
        CaptureError: the model is on the meta device, and nothing initializes a tensor.
        FileNotFoundError: there are no such ``weights``.
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
        trace: bool = False,
        strict: bool = False,
        optimizer: OptimizerFactory | None = None,
        compile: CompileOptions = False,
        timeout: float | None = None,
        verify: Verify = "first",
        weights: str | PathLike[str] | None = None,
        initialize: Initialize | None = None,
        parallelize: Parallelize | None = None,
    ) -> None:
        ranks = join_ranks(timeout)
        options = {
            "loss_fn": loss_fn,
            "reduction": reduction,
            "split": split,
            "merge": merge,
            "trace": trace,
            "strict": strict,
            "optimizer": optimizer,
            "compile": compile,
            "timeout": timeout,
            "verify": verify,
            "initialize": initialize,
            "parallelize": parallelize,
        }
        with making(ranks, plan, model, options):
            check_runs(plan, reduction, optimizer, timeout)
            check_functions(loss_fn=loss_fn, split=split, merge=merge)
            check_parallelize(parallelize, plan, ranks is not None, options)
            self._plan = plan
            infos = plan.profile.layers if plan.profile is not None else ()
            self._chain = chain = chain_of(model, infos, verify=verify, split_loss=loss_fn is None)
            if not chain.layers:
                raise InputError(
                    f"the plan does not say what the layers of a {type(chain.model).__name__} are. Only an "
                    "nn.Sequential whose layers share no Python values, such as a list that two of them hold, needs no "
                    "profile: make the plan with pipepart.plan(pipepart.profile(model, sample, ...), ...)"
                )
            self._loss = StepLoss(
                loss_fn
                or (loss_of if isinstance(chain, RecordedChain | Whole) and reduction != "batch" else None),
                Reduction(reduction) if reduction else None,
            )
            self._merge = merge
            self._traces = Traces(plan, always=trace)
            self._side = side = join(ranks, plan, chain, strict, parallelize)
            if (parallelize or not side.has_whole) and isinstance(chain, RecordedChain):
                chain.use_fake_parameters()
            values = InitialValues.of(chain.model, weights, initialize)
            self._stages = build_stages(
                chain.layers,
                side.plan,
                compile,
                strict,
                values,
                side.stages,
                side.replica,
            )
            self._batching = Batching(chain.entrance, chain.model.modules(), plan.micro_batches, split)
            warn_of_changes(plan, chain, stacklevel=2)
            super().__init__(side.part, chain.places, StageOptimizers(optimizer, chain, plan, side.stages))
            local = None if side.links is None else side.links.local
            self._emulation = emulation_of(plan, self._stages, loss_fn, strict, local)
            self._orders = Orders(plan, with_optimizers=optimizer is not None)
            # Last of what can fail: it starts the workers.
            self._engine = Engine(
                side.plan,
                self._stages,
                self._orders,
                self._emulation,
                timeout,
                side.links,
            )
        side.connect(self._stages)

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
        tensor: int = 1,
        shard: bool = False,
        compress: Compress = None,
        seconds: float | None = None,
        optimizer_state: str = "adam",
        split: Splitter | None = None,
        **options: Unpack[RunOptions],
    ) -> Pipeline:
        """Profile ``model`` on ``sample``, plan, and return the pipeline.

        Layers of a model on the meta device are measured one at a time, with random values. Under torchrun rank 0
        profiles and plans for all.

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
            tensor, shard: as for :func:`pipepart.plan`, with ``parallelize``. Layers are profiled whole, so the plan
                counts all their seconds and bytes on each device of a group, and no collectives. If such a plan does
                not fit, plan with a profile of ``pipepart.profile(..., parallelize=f, tensor=n)``.
            compress: ``"bf16"`` or ``"int8"`` to send activations and gradients in fewer bytes between hosts, or
                between devices of one host. See :func:`pipepart.plan`.
            seconds: time limit of the search for the plan, as for :func:`pipepart.plan`.
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
                InitialValues.of(model, options.get("weights"), options.get("initialize"))

        agreed: dict[str, Any] = {  # the same on all ranks
            "layers": layers,
            "schedule": schedule,
            "micro_batches": micro_batches,
            "recompute": recompute,
            "offload": offload,
            "replicas": replicas,
            "tensor": tensor,
            "shard": shard,
            "compress": compress,
            "seconds": seconds,
            "optimizer_state": optimizer_state,
        }
        make = partial(
            plan_for,
            model,
            sample,
            **agreed,
            target=target,
            loss_fn=loss_fn,
            devices=devices if devices is not None else Cluster.of_ranks() if under_torchrun() else 2,
            split=split,
            with_optimizers=options.get("optimizer") is not None,
            reduction=options.get("reduction"),
            parallelize=options.get("parallelize"),
            all_devices=under_torchrun(),
        )
        plan = planned_once(check, make, agreed)
        return cls(model, plan, loss_fn, split=split, **options)

    @property
    def plan(self) -> Plan:
        """The plan that the model is cut along."""
        return self._plan

    @property
    def mesh(self) -> DeviceMesh | None:
        """Under torchrun with replicas or ``parallelize``, the ranks by replica ("dp") and place in it ("pp").

        With ``tensor`` above 1 in the plan also by place in the group of a device ("tp"). None otherwise.
        """
        return self._side.mesh

    def meet(self, call: str) -> Ranks | None:
        """Synchronize all processes for the call of this name, and return them; None for a single process.

        Used by calls other than steps that need all ranks, such as :func:`pipepart.save`.

        Raises:
            RuntimeError: another rank makes another call, has failed, or is lost.
        """
        return self._side.meet(call)

    def close(self) -> None:
        """End the worker threads. The model stays usable, the pipeline does not. Closing twice does nothing.

        A step that is running, in another thread or in the layer that calls this, is finished first.
        """
        self._engine.close("the pipeline is closed")
        self._engine.join()

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
