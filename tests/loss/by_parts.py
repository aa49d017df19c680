"""A loss taken micro-batch by micro-batch, against torch's own of the whole mini-batch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipepart.data.split import sizes, split
from pipepart.loss import LossParts, StepLoss, value_of
from tests.support import plain


def check(loss_fn: Any, output: Any, target: Any, micro_batches: int, dimension: int = 0) -> None:
    """Fails unless loss and gradient at the output are those of the whole, in two steps of one pipeline."""
    loss = StepLoss(loss_fn)
    for _ in range(2):
        ours, ours_leaves = by_parts(loss, output, target, micro_batches, dimension)
        theirs, leaves = whole(loss_fn, output, target)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13, equal_nan=True)
        for mine, other in zip(ours_leaves, leaves, strict=True):
            if other.isfinite().all():
                plain.assert_near(mine, other, what="gradient")


def by_parts(
    loss: StepLoss, output: Any, target: Any, micro_batches: int, dimension: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients at the output, put together from micro-batches as a step does."""
    leaves, output = _leaves(output)
    samples = leaves[0].shape[dimension]
    micro_batches = min(micro_batches, samples)
    extents = sizes(samples, micro_batches)
    targets = split(target, micro_batches)
    parts = loss.parts(target, targets, extents)
    starts = [sum(extents[:index]) for index in range(micro_batches)]
    taken = []
    for index, (start, extent) in enumerate(zip(starts, extents, strict=True)):
        own = pytree.tree_map_only(Tensor, lambda t: t.narrow(dimension, start, extent), output)  # noqa: B023
        taken.append(parts.of(index, own, targets[index]))
    total = sum(
        value * _weight(parts, index, weight) for index, (value, weight) in enumerate(taken) if weight != 0
    )
    assert isinstance(total, Tensor)
    return total.detach(), _gradients(total, leaves)


def whole(loss_fn: Any, output: Any, target: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients at the output of the whole mini-batch."""
    leaves, output = _leaves(output)
    total = value_of(loss_fn(output) if target is None else loss_fn(output, target))
    return total.detach(), _gradients(total, leaves)


def _weight(parts: LossParts, index: int, weight: float | None) -> float:
    return parts.weight(index) if weight is None else weight


def _leaves(output: Any) -> tuple[list[Tensor], Any]:
    output = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(), output)
    return pytree.tree_leaves(output), output


def _gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    ]
