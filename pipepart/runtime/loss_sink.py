"""The far end of the pipeline: what becomes of the last stage's output, and where its gradient comes from."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..autograd import graph_cut
from ..autograd.own_copy import tensors
from ..loss import Added, LossParts
from .added import AddedByStages
from .failure.notes import LAYER, add_note


class End(Protocol):
    """Used by the worker of the last stage while a run goes on, and by the caller once it is over.

    Attributes:
        can_wait: whether an output that is made twice need only be received the second time.
    """

    can_wait: bool

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Takes the output of one micro-batch; returns where its gradients enter the last stage's graph."""
        ...

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """The gradients for those roots."""
        ...

    def needs_all(self, micro_batch: int) -> bool:
        """Whether these are only known when all micro-batches have been received."""
        ...

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Takes what the layers of any stage have added to the loss, on that stage's worker; returns its roots."""
        ...

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """The gradients for those roots."""
        ...

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """What has been received that counts in the loss: its micro-batch, what it is, and its value."""
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
        self._added = AddedByStages(parts.share_of_samples)
        self._seeds = _Seeds()

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Computes the loss of the micro-batch."""
        target = self._targets[micro_batch]
        if target is not None and (outputs := tensors(value)):
            target = graph_cut.move(target, outputs[0].device)
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
        return graph_cut.roots(loss)

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """The weight of the micro-batch."""
        loss, weight = self._losses[micro_batch]
        weight = self._parts.weight(micro_batch) if weight is None else weight
        return (self._seed(weight, loss),)

    def needs_all(self, micro_batch: int) -> bool:
        """Whether its weight is not known by itself."""
        return self._losses[micro_batch][1] is None

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Keeps their values."""
        return self._added.receive(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Their weights."""
        return [self._seed(weight, loss) for loss, weight in self._added.weighed(stage, micro_batch)]

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """The loss of each micro-batch that has a weight, and what layers have added."""
        for micro_batch, (loss, weight) in sorted(self._losses.items()):
            if weight != 0:
                yield micro_batch, "the loss", loss
        yield from self._added.losses()

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
        weights = torch.tensor([weight for _, weight in counted], dtype=losses.dtype, device="cpu")
        total = (losses * weights.to(home, non_blocking=True)).sum()
        added = self._added.total()
        return total if added is None else total + added.to(total.device, total.dtype)

    def _seed(self, weight: float, like: Tensor) -> Tensor:
        key, made = (weight, like.dtype, like.device), self._seeds.made
        if key not in made:
            seed = torch.full((), weight, dtype=like.dtype, device=like.device)
            made[key] = self._scaler.scale(seed).to(like.dtype) if self._scaler else seed
        return made[key]


class _Seeds(threading.local):
    """The gradients of losses that a worker has made: on its own streams, which no other worker's wait for."""

    def __init__(self) -> None:
        self.made: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


class OutputEnd:
    """Forward only, or with a backward to come: the outputs themselves.

    Args:
        sizes: samples in each micro-batch.
    """

    can_wait = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self.outputs: list[Any] = [None] * len(sizes)
        self.received_gradients: Sequence[graph_cut.Gradients] = ()
        self.added = AddedByStages(lambda micro_batch: sizes[micro_batch] / sum(sizes))
        self.gradient_of_added: Tensor | None = None

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keeps the output, cut from its graph."""
        self.outputs[micro_batch], roots = graph_cut.cut(value)
        return roots

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """What the caller has set."""
        return self.received_gradients[micro_batch]

    def needs_all(self, micro_batch: int) -> bool:
        """Nothing is."""
        return False

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Keeps their values."""
        return self.added.receive(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """What the caller has set for their total, times their weights; None where nobody has asked for it."""
        gradient = self.gradient_of_added
        return [
            None if gradient is None else gradient.to(loss.device, loss.dtype) * weight
            for loss, weight in self.added.weighed(stage, micro_batch)
        ]

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """What layers have added."""
        return self.added.losses()
