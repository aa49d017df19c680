"""OutputSink: receives the outputs of the last stage for a caller who computes the loss, or needs none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...autograd import graph_cut
from ...capture import Unfinished
from ...data.split import MicroBatches
from ...loss import MiniBatchLoss, StepLoss
from .loss_sink import LossSink, on_device_of


class OutputSink(LossSink):
    """Keeps the outputs for the caller: for a forward alone, or one whose backward the caller runs later.

    Attributes:
        received_gradients: of the roots of each micro-batch; the caller sets them.
        gradient_of_added: of the sum of the auxiliary losses; None if the caller has not set it.
    """

    received_gradients: Sequence[graph_cut.Gradients] = ()
    gradient_of_added: Tensor | None = None

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keep the output, detached from its graph."""
        self.outputs[micro_batch], roots = graph_cut.cut(value)
        return roots

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients that the caller has set."""
        return self.received_gradients[micro_batch]

    def _added_seed(self, weight: float, loss: Tensor) -> Tensor | None:
        gradient = self.gradient_of_added
        return None if gradient is None else gradient.to(loss.device, loss.dtype) * weight


def loss_of_outputs(loss: StepLoss, outputs: Sequence[Any], batch: MicroBatches) -> Tensor | None:
    """Return the loss of the mini-batch, with the graph of the outputs; None if the model computes no loss.

    Args:
        loss: of the pipeline.
        outputs: of the last stage, one a micro-batch.
        batch: the mini-batch.
    """
    if not any(isinstance(output, Unfinished) for output in outputs):
        return None
    of_batch = MiniBatchLoss(loss, batch)
    taken = [
        of_batch.take(index, output, on_device_of(output, target))
        for index, (output, target) in enumerate(zip(outputs, batch.targets, strict=True))
    ]
    return of_batch.differentiable_total(taken)
