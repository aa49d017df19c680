"""Lets autograd run a pipeline: one node in the caller's graph that stands for all stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import boundary
from ..microbatch import gather, split
from .ends import OutputEnd
from .run import Run

Forward = Callable[[Sequence[Any], OutputEnd], Run]
Backward = Callable[[Run, OutputEnd], Sequence[boundary.Gradients]]


def differentiable(value: Any, parts: int, forward: Forward, backward: Backward) -> Any:
    """The pipeline's output for ``value``, whose backward runs the stages' backwards.

    Args:
        value: the input of the mini-batch.
        parts: micro-batches to split it into.
        forward: runs all forwards.
        backward: runs all backwards of such a run; returns the gradients of its inputs for each micro-batch.
    """
    call = _Call(value, parts, forward, backward)
    anchor = torch.empty(
        0, requires_grad=True
    )  # the parameters are no inputs of the node, yet it is to run backward
    tensors = _Node.apply(call, anchor, *boundary.leaves(value))
    return call.rebuild(tensors)


class _Call:
    """One forward and the backward that belongs to it."""

    def __init__(self, value: Any, parts: int, forward: Forward, backward: Backward) -> None:
        self._inputs = [boundary.part(one) for one in split(value, parts)]
        self._shapes = [[leaf.shape for leaf in boundary.leaves(message)] for message in self._inputs]
        self._end = OutputEnd(parts)
        self._forward, self._backward = forward, backward
        self._run: Run | None = None
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
        return [item for item, _ in tensors], [like.requires_grad for _, like in tensors]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The output, with ``tensors`` in their places."""
        given = iter(tensors)
        nest = [next(given) if isinstance(item, Tensor) else item for item in self._nest]
        self._nest = []
        return pytree.tree_unflatten(nest, self._spec)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the input's leaves, from those of the output's tensors."""
        if self._run is None:
            raise RuntimeError(
                "backward through the same output of a pipeline a second time: its stash is gone"
            )
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
        found = self._backward(run, self._end)
        columns = zip(*found, strict=True)
        shapes = zip(*self._shapes, strict=True)
        return [_together(*pair) for pair in zip(columns, shapes, strict=True)]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        tensors, differentiable = call.forward()
        ctx.mark_non_differentiable(*(t for t, yes in zip(tensors, differentiable, strict=True) if not yes))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():  # each stage's graph is used once: there is no second derivative
            return (None, None, *ctx.call.backward(gradients))


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


def _together(gradients: Sequence[Tensor | None], shapes: Sequence[torch.Size]) -> Tensor | None:
    """The gradients of the parts of one tensor, joined: zeros for a part that was not used, None if none was."""
    given = next((gradient for gradient in gradients if gradient is not None), None)
    if given is None:
        return None
    pairs = zip(gradients, shapes, strict=True)
    return torch.cat([given.new_zeros(shape) if part is None else part for part, shape in pairs])
