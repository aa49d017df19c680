"""Computes the loss of an asynchronous step: the micro-batches of each optimizer step form a mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedules import Schedule, stepped_together

from ..autograd import graph_cut
from ..data.split import Merger, MicroBatches, joined
from ..loss import Added, LossError, Reduction, StepLoss
from ..planning.request import runs_forwards_first
from .loss_sink import BatchLossSink, BeforeBackward, MicroBatchLossSink


def make_loss_sink(
    loss: StepLoss,
    batch: MicroBatches,
    schedule: Schedule,
    scaler: torch.amp.GradScaler | None = None,
    before_backward: BeforeBackward | None = None,
    merge: Merger | None = None,
) -> MicroBatchLossSink | BatchLossSink | GroupedLossSink:
    """Return the loss sink of a step, which receives the outputs of the last stage.

    Raises:
        LossError: the loss is computed once on the whole output, and the schedule begins backwards before it is
            complete.
    """
    if loss.reduction is Reduction.BATCH:
        check_forwards_first(schedule)
        return BatchLossSink(loss, batch, scaler, merge)
    groups = stepped_together(schedule)
    if len(groups) == 1:
        return MicroBatchLossSink(loss.of_batch(batch), batch.targets, scaler, before_backward)
    ends = []
    for group in groups:
        part = slice(group.start, group.stop)
        targets = batch.targets[part]
        own = batch._replace(
            inputs=batch.inputs[part], targets=targets, sizes=batch.sizes[part], target=joined(targets)
        )
        ends.append(MicroBatchLossSink(loss.of_batch(own), own.targets))
    return GroupedLossSink(ends, groups)


def check_forwards_first(schedule: Schedule) -> None:
    """Check that a schedule allows a loss that is computed once on the output of all micro-batches.

    Raises:
        LossError: the last stage begins a backward before it has run all forwards, or there are replicas.
    """
    if not runs_forwards_first(schedule):
        raise LossError(
            "reduction='batch' computes the loss on the outputs of all micro-batches, and the plan's schedule has "
            "replicas or begins backwards before: "
            "plan = pipepart.plan(profile, cluster, reduction='batch')"
        )


class GroupedLossSink:
    """Training: the loss of each group of micro-batches, whose gradient one optimizer step applies.

    Args:
        ends: one for each group.
        groups: the micro-batches of each, in order.
    """

    can_wait = True

    def __init__(self, ends: Sequence[MicroBatchLossSink], groups: Sequence[range]) -> None:
        self._ends = ends
        self._groups = groups
        self._places = [
            (end, number) for end, group in zip(ends, groups, strict=True) for number in range(len(group))
        ]

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Compute the loss of the micro-batch."""
        end, number = self._places[micro_batch]
        roots = end.receive(number, value)
        if end.correction() != 1.0:
            raise LossError(
                "what the loss is divided by was only known behind the first backward of its group, too late for an "
                "asynchronous schedule: return (sum, count) with a count of the target alone"
            )
        return roots

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the weight of the micro-batch in its group."""
        end, number = self._places[micro_batch]
        return end.gradients(number)

    def correction(self) -> float:
        """Return 1: a group whose gradients need a correction raises an error."""
        return 1.0

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
    def trains(self) -> bool:
        """True if a gradient of any loss has reached the model."""
        return any(end.trains for end in self._ends)

    @property
    def total(self) -> Tensor:
        """Return the mean of the groups' losses, after all micro-batches were received."""
        return torch.stack([end.total for end in self._ends]).mean()
