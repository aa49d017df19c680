"""Keeps the outputs of a training step, for ``return_outputs=True``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..loss import Added
from .loss_sink import LossSink


class KeptOutputs:
    """A loss sink that keeps the output of each micro-batch and forwards every call to another sink.

    Args:
        sink: computes the losses.
        micro_batches: their number.

    Attributes:
        outputs: of the micro-batches, without a graph.
    """

    def __init__(self, sink: LossSink, micro_batches: int) -> None:
        self._sink = sink
        self.can_wait = sink.can_wait
        self.outputs: list[Any] = [None] * micro_batches

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keep the output and forward it."""
        self.outputs[micro_batch] = pytree.tree_map_only(Tensor, Tensor.detach, value)
        return self._sink.receive(micro_batch, value)

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Forward the call."""
        return self._sink.gradients(micro_batch)

    def correction(self) -> float:
        """Forward the call."""
        return self._sink.correction()

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Forward the call."""
        return self._sink.receive_added(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Forward the call."""
        return self._sink.added_gradients(stage, micro_batch)

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Forward the call."""
        return self._sink.losses()
