"""StepGradients: the gradients that a step adds, to correct them at its end or remove them if it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..loss import LossError


class StepGradients:
    """The gradients from before a step, and those that the step adds.

    Args:
        parameters: returns the parameters of the model, without those that stage optimizers update.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._apart = False

    def begin(self, certain: bool, others: Iterable[Tensor] = ()) -> None:
        """Called before the first backward.

        Args:
            certain: whether the gradients need no correction. Otherwise earlier gradients are set aside.
            others: further leaves that get a gradient from the loss.
        """
        self._before = [(leaf, leaf.grad) for leaf in dict.fromkeys((*self._parameters(), *others))]
        self._apart = not certain
        if self._apart:
            for leaf, _ in self._before:
                leaf.grad = None

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Add further leaves, before they get a gradient."""
        for leaf in leaves:
            self._before.append((leaf, leaf.grad))
            if self._apart:
                leaf.grad = None

    def finish(self, factor: float) -> None:
        """Multiply the gradients of the step by ``factor``, and add the earlier gradients.

        Raises:
            LossError: earlier gradients cannot be separated from those of the step.
        """
        if factor != 1.0:
            if not self._apart and any(before is not None for _, before in self._before):
                raise LossError(
                    "the micro-batches' losses are divided by other counts than their shapes say, and gradients of "
                    "earlier steps are there: return (sum, count), or clear the gradients before the step"
                )
            scale_gradients((leaf for leaf, _ in self._before), factor)
        if self._apart:
            for leaf, before in self._before:
                if before is not None:
                    leaf.grad = before if leaf.grad is None else before + leaf.grad
        self._before = []

    def take_back(self) -> None:
        """Remove the gradients of a failed step, if they can be separated from earlier ones."""
        for leaf, before in self._before:
            if self._apart or before is None:
                leaf.grad = before
        self._before = []


@torch.no_grad()
def scale_gradients(leaves: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients of tensors in place."""
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad.mul_(factor)


def scaled(gradient: Tensor | None, factor: float) -> Tensor | None:
    """Return the gradient times the factor; the gradient itself if the factor is 1."""
    return gradient if gradient is None or factor == 1.0 else gradient * factor
