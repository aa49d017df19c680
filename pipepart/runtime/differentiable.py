"""Makes a pipeline differentiable: all stages are one node in the caller's autograd graph.

::

    caller's graph     x ──split──▶ parts ──▶ [ node: F of all stages ] ──▶ outputs ──gather──▶ output ──▶ loss
                                          ◀── [ node: B of all stages ] ◀── gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..autograd.in_place import version
from ..autograd.own_copy import tensors
from ..loss import add_loss, collecting
from .failure.out_of_memory import frees_memory
from .loss_sink import OutputSink
from .step import Step

Forward = Callable[[Sequence[Any], OutputSink], Step]
Backward = Callable[[Step, OutputSink, bool], Sequence[graph_cut.Gradients]]


def differentiable(
    inputs: Sequence[Any],
    sizes: Sequence[int],
    forward: Forward,
    backward: Backward,
    devices: Iterable[torch.device],
    read_again: Iterable[tuple[str, Tensor]],
) -> list[Any]:
    """Run all forwards; return the outputs of the micro-batches. Their backward runs the backwards of the stages.

    Args:
        inputs: of the micro-batches, with the graph that made them, if any.
        sizes: samples in each micro-batch.
        forward: runs all forwards.
        backward: runs all backwards of such a run, with or without the gradients of parameters; returns the gradients
            of the inputs for each micro-batch.
        devices: of the parameters.
        read_again: parameters that the backward reads again and whose changes autograd does not notice, by name.
    """
    call = _Call(inputs, sizes, forward, backward, read_again)
    # The parameters are not inputs of the node, so an anchor makes it run backward. Autograd makes the caller's streams
    # wait for the streams of leaves, so each device with parameters needs a leaf.
    anchors = [torch.empty(0, requires_grad=True, device=device) for device in dict.fromkeys(devices)]
    made = _Node.apply(
        call, anchors[0], *(leaf for one in inputs for leaf in graph_cut.leaves(one)), *anchors[1:]
    )
    return call.rebuild(made)


@contextmanager
def gradients_kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restore the gradients of the parameters after the block."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


class _Call:
    """One forward and the backward that belongs to it."""

    def __init__(
        self,
        inputs: Sequence[Any],
        sizes: Sequence[int],
        forward: Forward,
        backward: Backward,
        read_again: Iterable[tuple[str, Tensor]],
    ) -> None:
        self._inputs = [graph_cut.part(one) for one in inputs]
        self._homes = [leaf.device for one in inputs for leaf in graph_cut.leaves(one)]
        self._read = [
            (name, tensor, version(tensor))
            for name, tensor in [*(("the input", t) for one in inputs for t in tensors(one)), *read_again]
        ]
        self._sink = OutputSink(sizes)
        self._collects = collecting()
        self._forward, self._backward = forward, backward
        self._run: Step | None = None
        self._nests: list[tuple[list[Any], Any]] = []
        self._asking: list[list[bool]] = []

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Return the tensors of all outputs, and which of them can be differentiated."""
        with torch.enable_grad():
            self._run = self._forward(self._inputs, self._sink)
        self._inputs = []
        self._nests = [pytree.tree_flatten(output) for output in self._sink.outputs]
        self._sink.outputs = [None] * len(self._nests)  # a second forward replaces them
        found = [[item for item in nest if isinstance(item, Tensor)] for nest, _ in self._nests]
        self._asking = [[tensor.requires_grad for tensor in row] for row in found]
        made = [tensor.detach() for row in found for tensor in row]
        asking = [asks for row in self._asking for asks in row]
        added = self._sink.added_total() if self._collects else None
        if added is None:
            self._collects = False
            return made, asking
        return [*made, added], [*asking, self._sink.added_have_graph]

    def rebuild(self, made: Sequence[Tensor]) -> list[Any]:
        """Return the outputs of the micro-batches, with their tensors replaced by those of the node."""
        if self._collects:
            *made, added = made
            add_loss(added, reduction="sum")
        given = iter(made)
        nests, self._nests = self._nests, []
        return [
            pytree.tree_unflatten([next(given) if isinstance(item, Tensor) else item for item in nest], spec)
            for nest, spec in nests
        ]

    @frees_memory
    def backward(self, gradients: Sequence[Tensor | None], parameters: bool) -> list[Tensor | None]:
        """Return the gradients of the inputs' leaves from the gradients of the output tensors."""
        if self._run is None:
            raise RuntimeError(
                "backward through the same output of a pipeline a second time: its stash is gone"
            )
        self._check_unwritten()
        if self._collects:
            *gradients, self._sink.gradient_of_added = gradients
        given = iter(gradients)
        rows = [[(next(given), asks) for asks in row] for row in self._asking]
        self._sink.received_gradients = [[gradient for gradient, asks in row if asks] for row in rows]
        run, self._run = self._run, None
        self._read = []
        found = self._backward(run, self._sink, parameters)
        return graph_cut.gradients_home((gradient for part in found for gradient in part), self._homes)

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
        tensors, asking = call.forward()
        ctx.mark_non_differentiable(*(t for t, asks in zip(tensors, asking, strict=True) if not asks))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # by create_graph=True alone
            raise RuntimeError(
                "create_graph=True: a pipeline has no second derivatives, as each stage's graph is used up by its "
                "backward. Compute such a term (a gradient penalty) with the plain model, pipe.module"
            )
        # `autograd.grad` of some tensors only does not pass through the anchor.
        parameters = torch._C._will_engine_execute_node(ctx.anchor)
        found = ctx.call.backward(gradients, parameters)
        return (None, None, *found, *[None] * (ctx.others - len(found)))
