"""The far end of the pipeline: what becomes of the last stage's output, and where its gradient comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import boundary
from ..loss import LossParts
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
    """Training: each micro-batch's loss, whose gradient is its weight in the loss of the mini-batch, scaled or not."""

    can_wait = True

    def __init__(
        self, parts: LossParts, targets: Sequence[Any], scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self._parts = parts
        self._targets = targets
        self._scaler = scaler
        self._losses: dict[int, tuple[Tensor, float | None]] = {}
        self._seeds: dict[float, Tensor] = {}

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Computes the loss of the micro-batch."""
        target = self._targets[micro_batch]
        if isinstance(value, Tensor) and target is not None:
            target = boundary.move(target, value.device)
        try:
            loss, weight = self._parts.of(micro_batch, value, target)
        except BaseException as error:
            add_note(error, f"{LAYER}in the forward of the loss")
            raise
        self._losses[micro_batch] = loss.detach(), weight
        if (
            weight == 0
        ):  # as when every target is ignored: the loss may be 0/0, and its gradient is not asked for
            return ()
        return boundary.roots(loss)

    def gradients(self, micro_batch: int) -> boundary.Gradients:
        """The weight of the micro-batch."""
        loss, weight = self._losses[micro_batch]
        weight = self._parts.weight(micro_batch) if weight is None else weight
        if weight not in self._seeds:
            seed = torch.full((), weight, dtype=loss.dtype, device=loss.device)
            self._seeds[weight] = self._scaler.scale(seed).to(loss.dtype) if self._scaler else seed
        return (self._seeds[weight],)

    @property
    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been received."""
        weighed = (
            (loss, self._parts.weight(micro_batch) if weight is None else weight)
            for micro_batch, (loss, weight) in sorted(self._losses.items())
        )
        counted = [(loss, weight) for loss, weight in weighed if weight]
        home = counted[0][0].device  # copies of the model have theirs where they are
        losses = torch.stack([loss.to(home) for loss, _ in counted])
        return (losses * losses.new_tensor([weight for _, weight in counted])).sum()


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
