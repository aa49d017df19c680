"""Cuts the autograd graph at the border of two stages: the tensors of one graph become leaves of the next.

::

    stage s                     |  stage s+1
    layers ──▶ y ──cut──▶ message (a leaf) ──enter──▶ layers ──▶ ...
               ▲ roots          |     ▼ .grad
               └────────── gradients ─┘

A message is what the layer returned (a tensor, or a nest of tuples, lists and dicts) with each tensor detached. Tensors
that required a gradient are leaves that require one. The gradients travel back as a list: one entry for each such leaf
in the order of the nest, None for a leaf that nothing used.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.autograd.variable import Variable
from torch.utils import _pytree as pytree

from .in_place import check_not_overwritten, note_sent
from .own_copy import own_copy, tensors

Gradients = Sequence[Tensor | None]

_run_backward = Variable._execution_engine.run_backward


class _Emulated(threading.local):
    """How the calling thread moves messages, if it is the worker of an emulated device.

    Attributes:
        bring: copies a message to the memory of that device unless it lives there; None on other threads.
        to_host: copies a tensor to the memory of the host; None on other threads.
    """

    bring: Callable[[Any], Any] | None = None
    to_host: Callable[[Tensor], Tensor] | None = None


emulated = _Emulated()


def cut(value: Any) -> tuple[Any, tuple[GradientEdge, ...]]:
    """Detach ``value`` as a message; return the message and the edges at which its gradients enter the old graph.

    The roots hold the graph but not the tensors, so the sender does not keep the message's memory alive.
    """
    if type(value) is Tensor:
        message = value.detach()
        note_sent(message)
        return (message.requires_grad_(), (root(value),)) if value.requires_grad else (message, ())
    nest, spec = pytree.tree_flatten(value)
    roots = []
    for index, item in enumerate(nest):
        if isinstance(item, Tensor):
            nest[index] = item.detach()
            note_sent(nest[index])
            if item.requires_grad:
                nest[index].requires_grad_()
                roots.append(root(item))
    return pytree.tree_unflatten(nest, spec), tuple(roots)


def part(value: Any) -> Any:
    """Return one part of a split mini-batch as a message whose version counters are independent of other parts.

    Views of one tensor share a version counter. With a shared counter, a layer that writes into one part would make
    autograd refuse the backwards of the other parts.
    """
    if type(value) is Tensor:
        return value.data.requires_grad_() if value.requires_grad else value.data
    return pytree.tree_map_only(Tensor, lambda t: t.data.requires_grad_(t.requires_grad), value)


def fresh_leaves(message: Any) -> Any:
    """Return the message with new leaves that share its memory and version counters.

    For the first of two forwards: a hook that a layer puts on its input would stay on the leaf, and the second forward
    puts it there again.
    """
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), message)


def roots(tensor: Tensor) -> tuple[GradientEdge, ...]:
    """Return the edge where the gradient of a tensor enters its graph; empty if it needs no gradient."""
    return (root(tensor),) if tensor.requires_grad else ()


def root(tensor: Tensor) -> GradientEdge:
    """Return the edge where the gradient of a tensor that requires one enters its graph."""
    node = tensor.grad_fn
    # A node made in Python does not keep its graph alive, which the edge that torch makes for it does.
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def received(message: Any, device: torch.device) -> tuple[Any, Sequence[Tensor]]:
    """Return a message on ``device``, and its tensors.

    Raises:
        RuntimeError: the stage that sent it has overwritten it.
    """
    parts = (message,) if type(message) is Tensor else tensors(message)
    check_not_overwritten(parts)
    for part in parts:
        if emulated.bring is not None or part.device != device:
            message = move(message, device)
            return message, tensors(message)
    return message, parts


def move(message: Any, device: torch.device, wait: bool = True) -> Any:
    """Move a message to ``device``. Tensors already there are not copied, and tensors that share memory still do.

    A copy to an accelerator is queued on its current stream. The host waits for a copy to the CPU; with ``wait``
    False the caller has to.
    """
    if emulated.bring is not None:
        return emulated.bring(message)
    if type(message) is Tensor:
        return message if message.device == device else _moved(message, device, wait)
    away = [tensor for tensor in tensors(message) if tensor.device != device]
    if not away:
        return message
    if len({_memory(tensor) for tensor in away}) < len(away):
        moved = own_copy(away, lambda tensor: _moved(tensor, device, wait))
    else:
        moved = [_moved(tensor, device, wait) for tensor in away]
    by_id = {id(old): new for old, new in zip(away, moved, strict=True)}
    return pytree.tree_map_only(Tensor, lambda t: by_id.get(id(t), t), message)


def _moved(tensor: Tensor, device: torch.device, wait: bool) -> Tensor:
    copied = tensor.detach().to(device, non_blocking=not wait or device.type != "cpu")
    return copied.requires_grad_(tensor.requires_grad)


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    """Return a key that is equal for two tensors that share a storage."""
    if tensor.layout is not torch.strided:
        return tensor.device, id(tensor)
    return tensor.device, tensor.untyped_storage().data_ptr()


def move_gradients(gradients: Gradients, device: torch.device) -> Gradients:
    """Move gradients to ``device``; gradients already there are not copied."""
    if emulated.bring is not None:
        return emulated.bring(list(gradients))
    for gradient in gradients:
        if gradient is not None and gradient.device != device:
            return move(list(gradients), device)
    return gradients


def gradients_home(gradients: Iterable[Tensor | None], homes: Iterable[torch.device]) -> list[Tensor | None]:
    """Move each gradient to the device of its leaf; the host waits for copies to the CPU."""
    pairs = zip(gradients, homes, strict=True)
    return [gradient if gradient is None else move(gradient, home) for gradient, home in pairs]


def backward_of_caller(inputs: Sequence[Any], gradients: Gradients) -> None:
    """Run the backward of the caller's graph, which computed the inputs of the micro-batches.

    All at once: the inputs may share a graph, which can be used only once.

    Args:
        inputs: one entry a micro-batch.
        gradients: one for each tensor of the inputs that requires a gradient, in their order.
    """
    if not gradients:
        return
    homes = [leaf.device for each in inputs for leaf in leaves(each)]
    backward([root for each in inputs for root in cut(each)[1]], gradients_home(gradients, homes))


def leaves(message: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a message that require a gradient."""
    if type(message) is Tensor:
        return (message,) if message.requires_grad else ()
    return tuple(tensor for tensor in tensors(message) if tensor.requires_grad)


def backward(
    roots: Sequence[GradientEdge],
    gradients: Gradients,
    only: Sequence[GradientEdge] = (),
    here: bool = False,
) -> None:
    """Run the backward of one graph from its roots; with ``only``, compute only the gradients of these edges.

    Roots without a gradient are ignored. With ``here`` all nodes run on this thread, as those of the CPU do; threads of
    accelerators are given Python's context variables, which takes longer.
    """
    for gradient in gradients:
        if gradient is None:
            used = [index for index, gradient in enumerate(gradients) if gradient is not None]
            roots, gradients = [roots[index] for index in used], [gradients[index] for index in used]
            break
    if not roots:
        return
    # torch.autograd.backward calls this after checks of the gradients, which are correct here by construction.
    run = _run_backward if here else _engine_run_backward
    run(
        tuple(roots),
        tuple(gradients),
        False,
        False,
        tuple(only),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _Catch(torch.autograd.Function):
    """Returns an alias of a leaf, with the same memory and version counter, and stores the gradient of the alias."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, caught: list[Tensor | None], index: int) -> Tensor:
        ctx.caught, ctx.index = caught, index
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.caught[ctx.index] = gradients[0]
        return None, None, None


def catching(message: Any, caught: list[Tensor | None]) -> Any:
    """Replace the leaves of a message by aliases that store their gradients in ``caught``, in the order of the leaves.

    They are not accumulated in the ``grad`` of the leaves, which would copy gradients of another layout. Layers may
    write into an alias, which autograd forbids for a leaf. The version counter is shared, so autograd still detects a
    write to a tensor that another graph has saved.
    """
    numbers = itertools.count()

    def enter(tensor: Tensor) -> Tensor:
        return _Catch.apply(tensor, caught, next(numbers)) if tensor.requires_grad else tensor

    return enter(message) if type(message) is Tensor else pytree.tree_map_only(Tensor, enter, message)


def views(message: Any) -> Any:
    """Replace the leaves of a message by views, for layers that only read their input.

    Autocast casts a leaf once for all that use it and sums their gradients in the low precision. In the model without
    pipelining the same tensor is no leaf: each use casts it, and the gradients are summed in its own precision.
    """
    if type(message) is Tensor:
        return message.view_as(message) if _is_cast(message) else message
    return pytree.tree_map_only(Tensor, lambda t: t.view_as(t) if _is_cast(t) else t, message)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.dtype is torch.float32 and tensor.layout is torch.strided
