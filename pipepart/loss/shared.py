"""What the followers of all micro-batches of a step share."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.in_place import version
from ..data.split import MicroBatches


class Shared:
    """What the followers of a step share: the targets, and numbers for expressions, equal if computed alike.

    Attributes:
        batch: the mini-batch.
    """

    def __init__(self, batch: MicroBatches) -> None:
        self.batch = batch
        self._numbers: dict[Hashable, int] = {}
        self._held: list[Tensor] = []

    @cached_property
    def targets(self) -> list[list[Any]]:
        """The leaves of each micro-batch's target."""
        return [pytree.tree_leaves(target) for target in self.batch.targets]

    @cached_property
    def regular(self) -> bool:
        """Whether micro-batches differ in nothing but the number of samples."""
        inputs = [pytree.tree_leaves(one) for one in self.batch.inputs]
        shapes = [
            [leaf.shape[1:] for leaf in (*one, *target) if isinstance(leaf, Tensor) and leaf.dim()]
            for one, target in zip(inputs, self.targets, strict=True)
        ]
        return self.batch.by_samples and all(other == shapes[0] for other in shapes)

    def number(self, expression: Hashable) -> int:
        """Return the number of an expression."""
        return self._numbers.setdefault(expression, len(self._numbers))

    def constant(self, tensor: Tensor) -> int:
        """Return the number of a tensor that is not from the batch; it is held, so that it keeps its identity."""
        self._held.append(tensor)
        return self.number(("constant", id(tensor), version(tensor)))
