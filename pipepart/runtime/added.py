"""What the layers of all stages have added to the loss in one run, each with its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..autograd import graph_cut
from ..loss import Added, Reduction


class AddedByStages:
    """The values of the losses that layers have added, by stage and micro-batch.

    Each worker writes those of its own stages; a forward that runs a second time writes the same again.

    Args:
        share: what part of the mini-batch's samples a micro-batch has.
    """

    def __init__(self, share: Callable[[int], float]) -> None:
        self.have_graph = False
        self._share = share
        self._losses: dict[tuple[int, int], list[tuple[Tensor, float, bool]]] = {}

    def receive(self, stage: int, micro_batch: int, losses: Sequence[Added]) -> tuple[GradientEdge, ...]:
        """Keeps the values; returns where gradients enter, of those that can be differentiated."""
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
        """The values and weights of those that can be differentiated."""
        return [(loss, weight) for loss, weight, has_graph in self._losses[stage, micro_batch] if has_graph]

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Micro-batch, what it is, and value of each."""
        for stage, micro_batch in sorted(self._losses):
            for loss, *_ in self._losses[stage, micro_batch]:
                yield micro_batch, f"a loss that a layer of stage {stage} adds", loss

    def total(self) -> Tensor | None:
        """What they add to the loss of the mini-batch; None where there are none."""
        weighed = [(loss, weight) for key in sorted(self._losses) for loss, weight, _ in self._losses[key]]
        if not weighed:
            return None
        total = weighed[0][0] * weighed[0][1]
        for loss, weight in weighed[1:]:
            total = total + (loss * weight).to(total.device)
        return total
