"""Keeps the outputs of a training step, for ``return_outputs=True``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..loss import Added
from .loss_sink import End


class KeptOutputs:
    """A loss sink that keeps the output of each micro-batch and forwards every call to another sink.

    Args:
        end: computes the losses.
        micro_batches: their number.

    Attributes:
        outputs: of the micro-batches, without a graph.
    """

    def __init__(self, end: End, micro_batches: int) -> None:
        self._end = end
        self.can_wait = end.can_wait
        self.outputs: list[Any] = [None] * micro_batches

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keep the output and forward it."""
        self.outputs[micro_batch] = pytree.tree_map_only(Tensor, Tensor.detach, value)
        return self._end.receive(micro_batch, value)

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """As the other end."""
        return self._end.gradients(micro_batch)

    def correction(self) -> float:
        """As the other end."""
        return self._end.correction()

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """As the other end."""
        return self._end.receive_added(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """As the other end."""
        return self._end.added_gradients(stage, micro_batch)

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """As the other end."""
        return self._end.losses()
