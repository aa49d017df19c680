"""Computes the loss of each micro-batch, weighted by its share in the loss of the mini-batch; chooses the loss sink."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedules import Schedule, stepped_together

from ...autograd import graph_cut
from ...autograd.own_copy import tensors
from ...data.gather import Merger
from ...data.split import Apart, MicroBatches
from ...loss import LossError, MicroBatchLoss, MiniBatchLoss, Reduction, StepLoss
from ...planning.request import runs_forwards_first
from ...workers.streams import has_streams
from ..failure.notes import LAYER, add_note
from .loss_sink import LossSink, on_device_of
from .mini_batch import BatchLossSink

BeforeBackward = Callable[[bool, Iterable[Tensor]], None]


class MicroBatchLossSink(LossSink):
    """Computes the loss of each micro-batch; its gradient is its (scaled) weight in the mini-batch's loss.

    Args:
        loss: of the steps.
        batch: the mini-batch.
        scaler, keep_outputs, groups, loss_weight: as for :class:`LossSink`. An asynchronous schedule has several
            groups.
        before_backward: called once, by the worker that begins the first backward of the run, with two arguments:
            whether :meth:`correction` is certain to be 1, and the leaves of the loss. Not called with several groups,
            which are never corrected.
        shared_out: whether other processes receive some of the micro-batches.
        replicas: the number of last stages. On accelerators each computes its losses apart from the others, whose
            streams its own do not wait for.
    """

    can_wait = True

    def __init__(
        self,
        loss: StepLoss,
        batch: MicroBatches,
        scaler: torch.amp.GradScaler | None = None,
        before_backward: BeforeBackward | None = None,
        keep_outputs: bool = False,
        groups: Sequence[range] | None = None,
        loss_weight: float = 1.0,
        shared_out: bool = False,
        replicas: int = 1,
    ) -> None:
        super().__init__(batch.sizes, groups, scaler, keep_outputs, loss_weight)
        groups = groups or [range(len(batch.sizes))]
        several = shared_out or replicas > 1
        self._losses = [MiniBatchLoss(loss, _of_group(batch, group), several) for group in groups]
        self._another = partial(MiniBatchLoss, loss, batch, several) if replicas > 1 else None
        # Of several last stages, by the thread of a worker on an accelerator; None for those on the CPU.
        self._by_worker: dict[int | None, MiniBatchLoss] = {}
        self._places = [
            (part, number)
            for part, group in zip(self._losses, groups, strict=True)
            for number in range(len(group))
        ]
        self._targets = batch.targets
        self._before_backward = before_backward if len(groups) == 1 else None
        self._lock = threading.Lock()

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Compute the loss of the micro-batch."""
        if self._keeps:
            self._keep(micro_batch, value)
        if self._another is not None:
            self._use_own_loss(micro_batch, value)
        loss, number = self._places[micro_batch]
        try:
            roots = loss.take(number, value, on_device_of(value, self._targets[micro_batch]))
        except BaseException as error:
            add_note(error, f"{LAYER}in the forward of the loss")
            raise
        if len(self._losses) > 1 and loss.correction() != 1.0:
            raise LossError(
                "what the loss is divided by was only known behind the first backward of its group, too late for an "
                "asynchronous schedule: return (sum, count) with a count of the target alone"
            )
        if roots:
            self._trains = True
        return tuple(map(graph_cut.root, roots))

    def _use_own_loss(self, micro_batch: int, output: Any) -> None:
        """Let each worker on an accelerator have its own loss, and those on the CPU another one.

        A worker would else read totals that another one computes on its own stream. Called with ``receiving`` held.
        """
        assert self._another is not None
        on_stream = any(has_streams(tensor.device) for tensor in tensors(output))
        worker, number = threading.get_ident() if on_stream else None, self._places[micro_batch][1]
        if worker not in self._by_worker:
            self._by_worker[worker] = self._another() if self._by_worker else self._losses[0]
        self._places[micro_batch] = self._by_worker[worker], number

    def _merge(self) -> None:
        """Let the first loss have the micro-batches of all workers, after all were received."""
        first, *others = self._by_worker.values() or self._losses[:1]
        for other in others:
            first.adopt(other.taken(first.device))
            first.certain &= other.certain
        self._by_worker.clear()

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the weights of the micro-batch's terms."""
        loss, number = self._places[micro_batch]
        with self._lock:
            weights = loss.weights(number)
            if self._before_backward is not None:
                self._before_backward(loss.certain, loss.leaves.values())
                self._before_backward = None
        return [self._seed(*weights[0])] if len(weights) == 1 else [self._seed(*each) for each in weights]

    def taken(self) -> dict[int, MicroBatchLoss]:
        """Return the losses of the micro-batches that were received here; replicas are in one group."""
        self._merge()
        return self._losses[0].taken()

    def adopt_taken(self, taken: Mapping[int, MicroBatchLoss]) -> None:
        """Take over the losses of micro-batches that other ranks received."""
        self._losses[0].adopt(taken)

    def correction(self) -> float:
        """Return the factor for the gradients of the run.

        Raises:
            LossError: no single factor corrects the gradients.
        """
        if len(self._losses) > 1:
            return 1.0
        if self._known is not None:
            factor = self._known.correction
        else:
            with self._lock:
                if len(self._by_worker) > 1 and self.certain:
                    return 1.0  # the streams of one worker need not wait for the others
                self._merge()
                factor = self._losses[0].correction()
        if factor != 1.0 and self.added_have_graph:
            raise LossError(
                "layers add losses, and what the loss is divided by was only known when all losses were: use "
                "schedule='gpipe' with recompute='never'"
            )
        return factor

    @property
    def certain(self) -> bool:
        """Whether the factor is 1, whatever the outputs are; of several groups it always is."""
        if self._known is not None:
            return self._known.certain
        losses = self._by_worker.values() or self._losses
        return len(self._losses) > 1 or all(loss.certain for loss in losses)

    @property
    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been received; of several groups the mean."""
        return self._with_added(len(self._losses))

    def _own_total(self) -> Tensor | None:
        if self._known is not None:
            return self._known.total
        self._merge()
        totals = [loss.total() for loss in self._losses]
        return totals[0] if len(totals) == 1 else torch.stack(totals).mean()


def _of_group(batch: MicroBatches, group: range) -> MicroBatches:
    """Return some micro-batches as a mini-batch of their own."""
    if len(group) == len(batch.sizes):
        return batch
    part = slice(group.start, group.stop)
    inputs, targets, sizes = batch.inputs[part], batch.targets[part], batch.sizes[part]
    return batch._replace(inputs=inputs, targets=targets, sizes=sizes, target=Apart())


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
        loss,
        batch,
        scaler,
        before_backward,
        keep_outputs,
        groups,
        loss_weight,
        shared_out,
        schedule.replicas,
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
