"""Computes the loss of the whole mini-batch once, on all outputs, for ``reduction="batch"``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...autograd import graph_cut
from ...data.gather import Merger, gather
from ...data.split import Apart, MicroBatches
from ...loss import LossError, StepLoss, check_gradient, value_of, without_slack
from ..failure.notes import LAYER, add_note
from .loss_sink import LossSink, on_device_of


class BatchLossSink(LossSink):
    """Computes the loss once, on the gathered output of all micro-batches, for ``reduction="batch"``.

    All forwards run before the first backward, which needs the gradient of the whole output.
    """

    def __init__(
        self,
        loss: StepLoss,
        batch: MicroBatches,
        scaler: torch.amp.GradScaler | None = None,
        merge: Merger | None = None,
        keep_outputs: bool = False,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__(batch.sizes, None, scaler, keep_outputs, loss_weight)
        if isinstance(batch.target, Apart) or not batch.by_samples:
            raise LossError(
                "reduction='batch' needs the target of all samples, which the parts of the split do not make up"
            )
        self._loss_fn = loss.function
        self._batch, self._merge = batch, merge
        self._received: dict[int, Any] = {}
        self._value: Tensor | None = None

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keep the output. After the last one, compute the loss and the gradients of all outputs."""
        if self._keeps:
            self._keep(micro_batch, value)
        output, roots = graph_cut.cut(value)
        self._trains |= bool(roots)
        if self._value is not None:  # a second forward
            return roots
        self._received[micro_batch] = output
        if len(self._received) == len(self._batch.sizes):
            try:
                self._compute()
            except BaseException as error:
                add_note(error, f"{LAYER}in the loss of the mini-batch")
                raise
        return roots

    def _compute(self) -> None:
        received = [self._received[index] for index in range(len(self._received))]
        output = gather(received, self._batch, self._merge)
        target = on_device_of(output, self._batch.target)
        assert self._loss_fn is not None
        loss = value_of(self._loss_fn(output) if target is None else self._loss_fn(output, target))
        if torch.is_grad_enabled():
            check_gradient(loss, self._loss_fn)
            weighted = loss if self._weight == 1.0 else loss * self._weight
            (self._scaler.scale(weighted) if self._scaler else weighted).backward()
        self._value = without_slack(loss.detach())

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients of the micro-batch's part of the output."""
        return [leaf.grad for leaf in graph_cut.leaves(self._received.pop(micro_batch))]

    @property
    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been received."""
        return self._with_added()

    def _own_total(self) -> Tensor | None:
        return self._value if self._known is None else self._known.total
