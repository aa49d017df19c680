"""How much each micro-batch's loss weighs in the loss of its mini-batch.

A sum over samples is the sum of the micro-batches' sums: every weight is 1. A mean is the mean of their means
weighted by what each was the mean of: samples, or the class targets that count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .counting import count
from .observe import observe
from .reduction import Reduction


class LossWeights:
    """The weights of the micro-batches of one mini-batch.

    Args:
        loss_fn: the loss; None where the model computes it, which is then taken for a mean over samples.
        sizes: samples in each micro-batch.
        targets: their targets.
        reduction: how the loss sums up; None to find out from the micro-batches as they come.
        doubted: the micro-batch on which a ``reduction`` that was found out is tried again; None to trust it.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor] | None,
        sizes: Sequence[int],
        targets: Sequence[Any],
        reduction: Reduction | None,
        doubted: int | None = None,
    ) -> None:
        self.reduction = Reduction.MEAN if loss_fn is None and reduction is None else reduction
        self._known = self.reduction is not None
        self._doubted = doubted
        self._loss_fn = loss_fn
        self._sizes = sizes
        self._targets = targets
        self._shares: list[float] = []

    def of(self, micro_batch: int, output: Any, loss: Tensor | None = None) -> float:
        """The weight of a micro-batch, whose ``output`` and ``loss`` are at hand.

        Raises:
            ValueError: the loss is neither a mean nor a sum.
        """
        if not self._known or micro_batch == self._doubted:
            self._observe(micro_batch, output, loss)
        if self.reduction is Reduction.SUM:
            return 1.0
        if not self._shares:
            self._shares = self._find_shares(micro_batch, output, loss)
        return self._shares[micro_batch]

    def _observe(self, micro_batch: int, output: Any, loss: Tensor | None) -> None:
        if self._loss_fn is None:
            return
        found = observe(self._loss_fn, output, self._targets[micro_batch], self._sizes[micro_batch], loss)
        if found and self.reduction and found != self.reduction:
            raise ValueError(
                f"the loss is a {self.reduction} over the samples of one micro-batch and a {found} over those of "
                f"micro-batch {micro_batch}: write it as one of both"
            )
        self.reduction = found or self.reduction

    def _find_shares(self, micro_batch: int, output: Any, loss: Tensor | None) -> list[float]:
        """What part of a mean each micro-batch makes up."""
        counts: Sequence[float] = self._sizes
        if self._loss_fn is not None and count(self._loss_fn, output, self._targets[micro_batch]) is not None:
            samples = self._sizes[micro_batch]
            counted = [
                count(self._loss_fn, _resized(output, samples, size), target)
                for size, target in zip(self._sizes, self._targets, strict=True)
            ]
            counts = [number for number in counted if number is not None]
            ratios = {number / size for number, size in zip(counts, self._sizes, strict=True)}
            if self._doubted is not None and len(ratios) > 1:
                self._known = False  # targets do not count alike, which the rest of the loss may not follow
                self._observe(micro_batch, output, loss)
        total = sum(counts)
        return [number / total if total else 1 / len(counts) for number in counts]


def _resized(output: Any, samples: int, wanted: int) -> Any:
    """An output of no values, shaped for another number of samples."""

    def resize(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] % samples == 0:
            shape[0] = shape[0] // samples * wanted
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, resize, output)
