"""The far end of the pipeline: what becomes of the last stage's output, and where its gradient comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import boundary
from ..loss import LossWeights, check_scalar
from .notes import LAYER, add_note


class End(Protocol):
    """Used by the worker of the last stage while a run goes on, and by the caller once it is over.

    Attributes:
        can_wait: whether an output that is made twice need only be received the second time.
    """

    can_wait: bool

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Takes the output of one micro-batch; returns where its gradients enter the last stage's graph."""
        ...

    def gradients(self, micro_batch: int) -> boundary.Gradients:
        """The gradients for those roots."""
        ...


class LossEnd:
    """Training: each micro-batch's loss, whose gradient is its weight in the loss of the mini-batch."""

    can_wait = True

    def __init__(
        self, loss_fn: Callable[..., Tensor] | None, targets: Sequence[Any], weights: LossWeights
    ) -> None:
        self._loss_fn = loss_fn
        self._targets = targets
        self._weights = weights
        self._losses: dict[int, tuple[Tensor, float]] = {}
        self._seeds: dict[float, Tensor] = {}

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Computes the loss of the micro-batch."""
        try:
            loss = self._loss(micro_batch, value)
            weight = self._weights.of(micro_batch, value, loss.detach())
        except BaseException as error:
            add_note(error, f"{LAYER}in the forward of the loss")
            raise
        self._losses[micro_batch] = loss.detach(), weight
        if (
            not weight
        ):  # as when every target is ignored: the loss may be 0/0, and its gradient is not asked for
            return ()
        if weight not in self._seeds:
            self._seeds[weight] = torch.full((), weight, dtype=loss.dtype, device=loss.device)
        return boundary.roots(loss)

    def gradients(self, micro_batch: int) -> boundary.Gradients:
        """The weight of the micro-batch."""
        return (self._seeds[self._losses[micro_batch][1]],)

    @property
    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been received."""
        counted = [(loss, weight) for _, (loss, weight) in sorted(self._losses.items()) if weight]
        losses = torch.stack([loss for loss, _ in counted])
        return (losses * losses.new_tensor([weight for _, weight in counted])).sum()

    def _loss(self, micro_batch: int, value: Any) -> Tensor:
        if self._loss_fn is None:
            return check_scalar(
                value, "the model computes no scalar loss of its own and no loss_fn is given: its output"
            )
        target = self._targets[micro_batch]
        if target is None:
            return check_scalar(self._loss_fn(value))
        device = value.device if isinstance(value, Tensor) else None
        return check_scalar(self._loss_fn(value, target if device is None else boundary.move(target, device)))


class OutputEnd:
    """Forward only, or with a backward to come: the outputs themselves."""

    can_wait = False

    def __init__(self, micro_batches: int) -> None:
        self.outputs: list[Any] = [None] * micro_batches
        self.received_gradients: Sequence[boundary.Gradients] = ()

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keeps the output, cut from its graph."""
        self.outputs[micro_batch], roots = boundary.cut(value)
        return roots

    def gradients(self, micro_batch: int) -> boundary.Gradients:
        """What the caller has set."""
        return self.received_gradients[micro_batch]
