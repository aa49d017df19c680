"""State that traces of a loss share between micro-batches, and between steps with the same loss and shapes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.in_place import version
from ..data.split import MicroBatches
from .terms import Targets


class Shared:
    """Numbers the expressions of a loss. Expressions that are computed the same way have the same number.

    Attributes:
        sizes: samples of each micro-batch.
        regular: whether micro-batches differ in nothing but the number of samples.
        patterns: what the loss is made of, by the shapes of a micro-batch.
    """

    def __init__(self, batch: MicroBatches, targets: Targets) -> None:
        self.sizes = batch.sizes
        self.regular = batch.by_samples and _is_regular(batch, targets)
        self.patterns: dict[Hashable, Any] = {}
        self._numbers: dict[Hashable, int] = {}
        self._held: list[Tensor] = []

    def number(self, expression: Hashable) -> int:
        """Return the number of an expression."""
        return self._numbers.setdefault(expression, len(self._numbers))

    def constant(self, tensor: Tensor) -> int:
        """Return the number of a tensor that is not from the batch. The tensor is held, so that its id stays unique."""
        self._held.append(tensor)
        return self.number(("constant", id(tensor), version(tensor)))


def targets_of(batch: MicroBatches) -> Targets:
    """Return the leaves of each micro-batch's target."""
    return [pytree.tree_leaves(target) for target in batch.targets]


def form_of_batch(batch: MicroBatches, targets: Targets) -> Hashable:
    """Return the sizes and shapes of the micro-batches as a key. Numbers of expressions depend on it and on the loss.

    None if micro-batches share a tensor of the target, which is a constant of this step alone.
    """
    for leaves in targets[1:]:
        if any(leaf is first for leaf, first in zip(leaves, targets[0], strict=False)):
            return None
    shapes = tuple(tuple(getattr(leaf, "shape", None) for leaf in leaves) for leaves in targets)
    return tuple(batch.sizes), batch.by_samples, batch.by_samples and _is_regular(batch, targets), shapes


def _is_regular(batch: MicroBatches, targets: Targets) -> bool:
    inputs = [pytree.tree_leaves(one) for one in batch.inputs]
    shapes = [
        [leaf.shape[1:] for leaf in (*one, *target) if isinstance(leaf, Tensor) and leaf.dim()]
        for one, target in zip(inputs, targets, strict=True)
    ]
    return all(other == shapes[0] for other in shapes)
