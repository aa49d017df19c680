"""The far end of an asynchronous step: the micro-batches of each optimizer step are a mini-batch of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedules import Schedule, stepped_together

from ..autograd import graph_cut
from ..data.split import MicroBatches, joined
from ..loss import Added, StepLoss
from .loss_sink import LossEnd


def step_end(
    loss: StepLoss, batch: MicroBatches, schedule: Schedule, scaler: torch.amp.GradScaler | None = None
) -> LossEnd | GroupedEnd:
    """What the last stage's outputs of a step go to."""
    groups = stepped_together(schedule)
    if len(groups) == 1:
        return LossEnd(loss.parts(batch.target, batch.targets, batch.sizes), batch.targets, scaler)
    targets = [batch.targets[group.start : group.stop] for group in groups]
    ends = [
        LossEnd(loss.parts(joined(own), own, batch.sizes[group.start : group.stop]), own)
        for own, group in zip(targets, groups, strict=True)
    ]
    return GroupedEnd(ends, groups)


class GroupedEnd:
    """Training: the loss of each group of micro-batches, whose gradient one optimizer step applies.

    Args:
        ends: one for each group.
        groups: the micro-batches of each, one group behind the other.
    """

    can_wait = True

    def __init__(self, ends: Sequence[LossEnd], groups: Sequence[range]) -> None:
        self._ends = ends
        self._groups = groups
        self._places = [
            (end, number) for end, group in zip(ends, groups, strict=True) for number in range(len(group))
        ]

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Computes the loss of the micro-batch."""
        end, number = self._places[micro_batch]
        return end.receive(number, value)

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """The weight of the micro-batch in its group."""
        end, number = self._places[micro_batch]
        return end.gradients(number)

    def needs_all(self, micro_batch: int) -> bool:
        """Whether its weight is not known by itself."""
        end, number = self._places[micro_batch]
        return end.needs_all(number)

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Keeps the values."""
        end, number = self._places[micro_batch]
        return end.receive_added(stage, number, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Their weights."""
        end, number = self._places[micro_batch]
        return end.added_gradients(stage, number)

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Those of all groups."""
        for end, group in zip(self._ends, self._groups, strict=True):
            for number, which, loss in end.losses():
                yield group[number], which, loss

    @property
    def total(self) -> Tensor:
        """The mean of the groups' losses, when all micro-batches have been received."""
        return torch.stack([end.total for end in self._ends]).mean()
