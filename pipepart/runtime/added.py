"""Collects the auxiliary losses that layers add in one run, and weights them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..autograd import graph_cut
from ..loss import Added, Reduction


class AddedByStages:
    """The auxiliary losses of one run, by stage and micro-batch.

    Each worker writes the values of its own stages. A recomputed forward writes the same values again.

    Args:
        share: the fraction of the mini-batch's samples in a micro-batch.
    """

    def __init__(self, share: Callable[[int], float]) -> None:
        self.have_graph = False
        self._share = share
        self._losses: dict[tuple[int, int], list[tuple[Tensor, float, bool]]] = {}

    def receive(self, stage: int, micro_batch: int, losses: Sequence[Added]) -> tuple[GradientEdge, ...]:
        """Store the values; return the tensors of those that can be differentiated, where their gradients enter."""
        self._losses[stage, micro_batch] = [
            (
                loss.detach(),
                1.0 if reduction is Reduction.SUM else self._share(micro_batch),
                loss.requires_grad,
            )
            for loss, reduction in losses
        ]
        roots = tuple(root for loss, _ in losses for root in graph_cut.roots(loss))
        self.have_graph |= bool(roots)
        return roots

    def weighed(self, stage: int, micro_batch: int) -> list[tuple[Tensor, float]]:
        """Return values and weights of the losses that can be differentiated."""
        return [(loss, weight) for loss, weight, has_graph in self._losses[stage, micro_batch] if has_graph]

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Return micro-batch, description and value of each loss."""
        for stage, micro_batch in sorted(self._losses):
            for loss, *_ in self._losses[stage, micro_batch]:
                yield micro_batch, f"a loss that a layer of stage {stage} adds", loss

    def total(self) -> Tensor | None:
        """Return their sum in the loss of the mini-batch; None if there are none."""
        weighed = [(loss, weight) for key in sorted(self._losses) for loss, weight, _ in self._losses[key]]
        if not weighed:
            return None
        total = weighed[0][0] * weighed[0][1]
        for loss, weight in weighed[1:]:
            total = total + (loss * weight).to(total.device)
        return total
