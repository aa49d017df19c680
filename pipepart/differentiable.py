"""Makes a pipeline differentiable: all its stages form one node in the caller's autograd graph.

::

    caller's graph     x ──split──▶ parts ──▶ [ node: F of all stages ] ──▶ outputs ──gather──▶ output ──▶ loss
                                          ◀── [ node: B of all stages ] ◀── gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from .autograd import graph_cut
from .autograd.in_place import version
from .autograd.own_copy import tensors
from .data.split import MicroBatches
from .distributed import SingleProcess
from .distributed.single_process import Agreed
from .loss import add_loss, collecting
from .restoring import restoring
from .runtime.engine import Engine
from .runtime.failure.out_of_memory import public_call
from .runtime.sinks import OutputSink
from .runtime.step import Step
from .workers.modes import Modes
from .workers.streams import order_gradients

R = TypeVar("R")


def differentiable(
    engine: Engine,
    agreed: Agreed,
    parameters: Mapping[str, nn.Parameter],
    recomputes: bool,
    processes: SingleProcess,
) -> list[Any]:
    """Run all forwards; return the outputs of the micro-batches. Their backward runs the backwards of the stages.

    Args:
        engine: the engine of the pipeline.
        agreed: the micro-batches, with the autograd graph of their inputs, if any.
        parameters: the parameters of the model, by name.
        recomputes: whether the backward reads the parameters again. Autograd does not notice if they have changed.
        processes: the processes that the pipeline runs on.
    """
    call = _Call(engine, agreed, parameters, recomputes, processes)
    # The parameters are not inputs of the node, so an anchor makes it run backward. Autograd makes the caller's streams
    # wait for the streams of leaves, so each device with parameters needs a leaf.
    first, *others = (torch.empty(0, requires_grad=True, device=device) for device in engine.devices)
    leaves = (leaf for inputs in agreed.batch.inputs for leaf in graph_cut.leaves(inputs))
    return call.rebuild(_Node.apply(call, first, *leaves, *others))


def _keeping_gradients(parameters: Iterable[nn.Parameter], run: Callable[[], R]) -> R:
    """Call a function, and restore the gradients that the parameters had before."""
    kept = [(parameter, parameter.grad) for parameter in parameters]

    def cleared() -> R:
        for parameter, _ in kept:
            parameter.grad = None
        return run()

    def restore() -> None:
        for parameter, gradient in kept:
            parameter.grad = gradient

    return restoring(cleared, restore)


class _Call:
    """One forward and the backward that belongs to it."""

    def __init__(
        self,
        engine: Engine,
        agreed: Agreed,
        parameters: Mapping[str, nn.Parameter],
        recomputes: bool,
        processes: SingleProcess,
    ) -> None:
        batch = agreed.batch
        self._engine = engine
        self._batch: MicroBatches | None = batch
        self._form, self._seed, self._number = agreed.form, agreed.seed, agreed.number
        self._processes = processes
        self._parameters = list(parameters.values())
        self._homes = [leaf.device for inputs in batch.inputs for leaf in graph_cut.leaves(inputs)]
        read = [("the input", tensor) for inputs in batch.inputs for tensor in tensors(inputs)]
        if recomputes:
            read += [(f"parameter {name!r}", parameter) for name, parameter in parameters.items()]
        self._read = [(name, tensor, version(tensor)) for name, tensor in read]
        self._sink = OutputSink(batch.sizes)
        self._collects = collecting()
        self._casts = [dtype for _, dtype in Modes.current().autocast]
        self._run: Step | None = None
        self._flattened: list[tuple[list[Any], Any]] = []  # outputs: their items, and what rebuilds them
        self._requires_grad: list[list[bool]] = []  # for each tensor of each output

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Return the tensors of all outputs, and which of them can be differentiated."""
        batch, self._batch = self._batch, None
        assert batch is not None
        with torch.enable_grad():
            inputs = [graph_cut.part(each) for each in batch.inputs]
            self._run = self._engine.forwards_for_caller(inputs, self._sink, self._form, self._seed)
        self._processes.end(self._run)
        self._processes.collect(self._sink.outputs, batch.inputs, always=True)
        self._flattened = [pytree.tree_flatten(output) for output in self._sink.outputs]
        self._sink.outputs = [None] * len(self._flattened)  # a second forward replaces them
        rows = [[item for item in items if isinstance(item, Tensor)] for items, _ in self._flattened]
        self._requires_grad = [[tensor.requires_grad for tensor in row] for row in rows]
        detached = [tensor.detach() for row in rows for tensor in row]
        requires_grad = [required for row in self._requires_grad for required in row]
        added = self._sink.added_total() if self._collects else None
        if added is None:
            self._collects = False
            return detached, requires_grad
        return [*detached, added], [*requires_grad, self._sink.added_have_graph]

    def rebuild(self, results: Sequence[Tensor]) -> list[Any]:
        """Return the outputs of the micro-batches, with their tensors replaced by the results of the node."""
        if self._collects:
            *results, added = results
            add_loss(added, reduction="sum")
        remaining = iter(results)
        flattened, self._flattened = self._flattened, []
        return [
            pytree.tree_unflatten(
                [next(remaining) if isinstance(item, Tensor) else item for item in items], spec
            )
            for items, spec in flattened
        ]

    @public_call
    def backward(self, gradients: Sequence[Tensor | None], parameters: bool) -> list[Tensor | None]:
        """Return the gradients of the inputs' leaves from the gradients of the output tensors."""
        if self._run is None:
            raise RuntimeError(
                "backward through the same output of a pipeline a second time: its stash is gone"
            )
        form = self._processes.begin_backward(
            self._form, self._number, gradients, parameters, self._check_unwritten
        )
        if self._collects:
            *gradients, self._sink.gradient_of_added = gradients
        remaining = iter(gradients)
        rows = [[(next(remaining), required) for required in row] for row in self._requires_grad]
        self._sink.received_gradients = [[gradient for gradient, required in row if required] for row in rows]
        run, self._run = self._run, None
        self._read = []

        devices = self._engine.devices
        order_gradients(devices, devices)

        def backwards() -> Sequence[Tensor | None]:
            step = self._engine.backwards(run, self._sink, form)
            return self._processes.end_backward(step, torch.float16 in self._casts)

        of_inputs = backwards() if parameters else _keeping_gradients(self._parameters, backwards)
        at_home = graph_cut.gradients_home(of_inputs, self._homes)
        order_gradients(self._homes, devices)
        return at_home

    def _check_unwritten(self) -> None:
        """Raise, as autograd does, if a tensor that the backward reads was written after the forward."""
        for name, tensor, noted in self._read:
            if version(tensor) != noted:
                raise RuntimeError(
                    f"{name} of a pipeline was modified by an inplace operation between a forward and its backward: it "
                    f"is at version {version(tensor)}, the forward read version {noted}. Go backward first, or give "
                    "the pipeline a copy (x.clone())"
                )


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.others = len(others)
        ctx.anchor = get_gradient_edge(anchor).node
        ctx.set_materialize_grads(False)
        results, requires_grad = call.forward()
        without = [each for each, required in zip(results, requires_grad, strict=True) if not required]
        ctx.mark_non_differentiable(*without)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # by create_graph=True alone
            raise RuntimeError(
                "create_graph=True: a pipeline has no second derivatives, as each stage's graph is used up by its "
                "backward. Compute such a term (a gradient penalty) with the plain model, pipe.module"
            )
        # `autograd.grad` of some tensors only does not pass through the anchor.
        parameters = torch._C._will_engine_execute_node(ctx.anchor)
        of_inputs = ctx.call.backward(gradients, parameters)
        return (None, None, *of_inputs, *[None] * (ctx.others - len(of_inputs)))
