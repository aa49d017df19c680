"""Chooses and creates the loss sink for a loss and a schedule."""

from __future__ import annotations

import torch

from schedules import Schedule, stepped_together

from ...data.gather import Merger
from ...data.split import MicroBatches
from ...loss import LossError, Reduction, StepLoss
from ...planning.request import runs_forwards_first
from .micro_batches import BeforeBackward, MicroBatchLossSink
from .mini_batch import BatchLossSink


def make_loss_sink(
    loss: StepLoss,
    batch: MicroBatches,
    schedule: Schedule,
    scaler: torch.amp.GradScaler | None = None,
    before_backward: BeforeBackward | None = None,
    merge: Merger | None = None,
    keep_outputs: bool = False,
    loss_weight: float = 1.0,
    shared_out: bool = False,
) -> MicroBatchLossSink | BatchLossSink:
    """Return the loss sink of a step, which receives the outputs of the last stage.

    Raises:
        LossError: the loss is computed once on the whole output, and the schedule begins backwards before it is
            complete.
    """
    if loss.reduction is Reduction.BATCH:
        check_forwards_first(schedule)
        return BatchLossSink(loss, batch, scaler, merge, keep_outputs, loss_weight)
    groups = stepped_together(schedule)
    return MicroBatchLossSink(
        loss, batch, scaler, before_backward, keep_outputs, groups, loss_weight, shared_out
    )


def check_forwards_first(schedule: Schedule) -> None:
    """Check that a schedule allows a loss that is computed once on the output of all micro-batches.

    Raises:
        LossError: the last stage begins a backward before it has run all forwards, or there are replicas.
    """
    if not runs_forwards_first(schedule):
        raise LossError(
            "reduction='batch' computes the loss on the outputs of all micro-batches, and the plan's schedule has "
            "replicas or begins backwards before: plan = pipepart.plan(profile, cluster, reduction='batch')"
        )
