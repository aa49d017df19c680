"""Lets autograd run a pipeline: one node in the caller's graph that stands for all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..data.split import gather
from ..loss import add_loss, collecting
from .failure.out_of_memory import frees_memory
from .loss_sink import OutputEnd
from .step import Step

Forward = Callable[[Sequence[Any], OutputEnd], Step]
Backward = Callable[[Step, OutputEnd, bool], Sequence[graph_cut.Gradients]]


def differentiable(
    inputs: Sequence[Any],
    sizes: Sequence[int],
    forward: Forward,
    backward: Backward,
    devices: Iterable[torch.device],
) -> Any:
    """The pipeline's output for a mini-batch, whose backward runs the stages' backwards.

    Args:
        inputs: of the micro-batches, with the graph that made them, if any.
        sizes: samples in each micro-batch.
        forward: runs all forwards.
        backward: runs all backwards of such a run, for the parameters too or not; returns the gradients of its inputs
            for each micro-batch.
        devices: of the parameters.
    """
    call = _Call(inputs, sizes, forward, backward)
    # The parameters are no inputs of the node, yet it is to run backward. And the streams on which a backward is called
    # wait for those on which leaves were made, so on each device where it adds to parameters there is to be a leaf.
    anchors = [torch.empty(0, requires_grad=True, device=device) for device in dict.fromkeys(devices)]
    tensors = _Node.apply(
        call, anchors[0], *(leaf for one in inputs for leaf in graph_cut.leaves(one)), *anchors[1:]
    )
    return call.rebuild(tensors)


@contextmanager
def gradients_kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """The parameters' gradients stay what they are, whatever the block adds to them."""
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
        self, inputs: Sequence[Any], sizes: Sequence[int], forward: Forward, backward: Backward
    ) -> None:
        self._inputs = [graph_cut.part(one) for one in inputs]
        self._homes = [leaf.device for one in inputs for leaf in graph_cut.leaves(one)]
        self._end = OutputEnd(sizes)
        self._collects = collecting()
        self._forward, self._backward = forward, backward
        self._run: Step | None = None
        self._nest: list[Any] = []
        self._spec: Any = None

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """The tensors of the gathered output, and which of them can be differentiated."""
        with torch.enable_grad():
            self._run = self._forward(self._inputs, self._end)
        self._inputs = []
        self._nest, self._spec = pytree.tree_flatten(
            gather([_detached(output) for output in self._end.outputs])
        )
        first = pytree.tree_leaves(self._end.outputs[0])
        tensors = [
            (item, like) for item, like in zip(self._nest, first, strict=True) if isinstance(item, Tensor)
        ]
        made, differentiable = [item for item, _ in tensors], [like.requires_grad for _, like in tensors]
        added = self._end.added.total() if self._collects else None
        if added is None:
            self._collects = False
            return made, differentiable
        return [*made, added], [*differentiable, self._end.added.have_graph]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The output, with ``tensors`` in their places."""
        if self._collects:
            *tensors, added = tensors
            add_loss(added, reduction="sum")
        given = iter(tensors)
        nest = [next(given) if isinstance(item, Tensor) else item for item in self._nest]
        self._nest = []
        return pytree.tree_unflatten(nest, self._spec)

    @frees_memory
    def backward(self, gradients: Sequence[Tensor | None], parameters: bool) -> list[Tensor | None]:
        """The gradients of the inputs' leaves, from those of the output's tensors."""
        if self._run is None:
            raise RuntimeError(
                "backward through the same output of a pipeline a second time: its stash is gone"
            )
        if self._collects:
            *gradients, self._end.gradient_of_added = gradients
        outputs = [
            [item for item in pytree.tree_leaves(output) if isinstance(item, Tensor)]
            for output in self._end.outputs
        ]
        columns = [
            _apart(gradient, [row[index] for row in outputs]) for index, gradient in enumerate(gradients)
        ]
        self._end.received_gradients = [
            [column[part] for column, tensor in zip(columns, row, strict=True) if tensor.requires_grad]
            for part, row in enumerate(outputs)
        ]
        run, self._run = self._run, None
        found = self._backward(run, self._end, parameters)
        return graph_cut.gradients_home((gradient for part in found for gradient in part), self._homes)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.others = len(others)
        ctx.anchor = get_gradient_edge(anchor).node
        ctx.set_materialize_grads(False)
        tensors, differentiable = call.forward()
        ctx.mark_non_differentiable(*(t for t, yes in zip(tensors, differentiable, strict=True) if not yes))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        # The anchor is not on the way where gradients of some tensors alone are asked for, as by `autograd.grad`.
        parameters = torch._C._will_engine_execute_node(ctx.anchor)
        with torch.no_grad():  # each stage's graph is used once: there is no second derivative
            found = ctx.call.backward(gradients, parameters)
        return (None, None, *found, *[None] * (ctx.others - len(found)))


def _detached(output: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, output)


def _apart(gradient: Tensor | None, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradient of gathered tensors, for each of them."""
    if gradient is None:
        return [None] * len(tensors)
    if len(tensors) == 1:
        return [gradient]
    if tensors[0].dim() == 0:
        return gradient.unbind()
    return gradient.split([tensor.shape[0] for tensor in tensors])
