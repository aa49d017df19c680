"""Computes a loss micro-batch by micro-batch, and compares it with the loss of the whole mini-batch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipepart.data.split import MicroBatches, are_regular, sizes, split
from pipepart.loss import MiniBatchLoss, Reduction, StepLoss, value_of
from tests.support import plain
from tests.support.plain import copied


def check(loss_fn: Any, output: Any, target: Any, micro_batches: int, dimension: int = 0) -> None:
    """Fails unless loss and gradient at the output are those of the whole.

    Backwards begin behind each forward, as under 1f1b with one stage, or behind the last forward, as under gpipe.
    """
    theirs, leaves = whole(loss_fn, output, copied(target))
    for all_forwards_first in (False, True):
        ours, mine = by_parts(loss_fn, output, copied(target), micro_batches, dimension, all_forwards_first)
        assert ours.isfinite() == theirs.isfinite()
        if theirs.isfinite():
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
        for one, other in zip(mine, leaves, strict=True):
            if other.isfinite().all():
                plain.assert_near(one, other, what="gradient")


def by_parts(
    loss_fn: Any,
    output: Any,
    target: Any,
    micro_batches: int,
    dimension: int = 0,
    all_forwards_first: bool = False,
    reduction: Reduction | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients at the output, put together from micro-batches as a step does."""
    leaves, output = _leaves(output)
    samples = leaves[0].shape[dimension]
    extents = sizes(samples, min(micro_batches, samples))
    targets = split(target, len(extents))
    starts = [sum(extents[:index]) for index in range(len(extents))]
    parts = [
        pytree.tree_map_only(Tensor, lambda t: t.narrow(dimension, start, extent), output)  # noqa: B023
        for start, extent in zip(starts, extents, strict=True)
    ]
    regular = are_regular([*zip(parts, targets, strict=True)])
    batch = MicroBatches(parts, targets, extents, target, True, regular)
    loss = MiniBatchLoss(loss_fn if isinstance(loss_fn, StepLoss) else StepLoss(loss_fn, reduction), batch)
    factor = backward_of_all(loss, parts, targets, all_forwards_first)
    return loss.total(), _gradients(leaves, factor)


def backward_of_all(
    loss: MiniBatchLoss, parts: list[Any], targets: list[Any], all_forwards_first: bool
) -> float:
    """Adds gradients to the leaves of all parts; returns the factor that puts them right."""
    taken = {}

    def backward(index: int) -> None:
        roots = taken[index]
        weights = loss.weights(index)
        seeds = [torch.as_tensor(w, dtype=r.dtype) for (w, _), r in zip(weights, roots, strict=True)]
        torch.autograd.backward(roots, seeds)

    for index, (part, target) in enumerate(zip(parts, targets, strict=True)):
        taken[index] = loss.take(index, part, target)
        if not all_forwards_first:
            backward(index)
    if all_forwards_first:
        for index in taken:
            backward(index)
    return loss.correction()


def whole(loss_fn: Any, output: Any, target: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients at the output of the whole mini-batch."""
    leaves, output = _leaves(output)
    total = value_of(loss_fn(output) if target is None else loss_fn(output, target))
    total.backward()
    return total.detach(), _gradients(leaves)


def _leaves(output: Any) -> tuple[list[Tensor], Any]:
    output = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(), output)
    return pytree.tree_leaves(output), output


def _gradients(leaves: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * factor for leaf in leaves]
