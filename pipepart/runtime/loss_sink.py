"""Loss sinks: receive the outputs of the last stage and return their gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..autograd import graph_cut
from ..autograd.own_copy import tensors
from ..data.split import Apart, Merger, MicroBatches, gather
from ..loss import Added, LossError, MiniBatchLoss, StepLoss, check_gradient, value_of
from .added import AddedByStages
from .failure.notes import LAYER, add_note

BeforeBackward = Callable[[bool, Iterable[Tensor]], None]


class LossSink(Protocol):
    """Receives the outputs of the last stage. Used by that stage's worker during a run, and by the caller after it.

    Attributes:
        can_wait: whether an output that is made twice need only be received the second time.
    """

    can_wait: bool

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Receive the output of one micro-batch; return the roots: tensors where its gradients enter the graph."""
        ...

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """The gradients for those roots."""
        ...

    def correction(self) -> float:
        """Return the factor for the gradients of the run, after all micro-batches were received."""
        ...

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Receive the auxiliary losses of a stage's layers, on that stage's worker; return their roots."""
        ...

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """The gradients for those roots."""
        ...

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Return micro-batch, description and value of everything received that counts in the loss."""
        ...


class MicroBatchLossSink:
    """Computes the loss of each micro-batch in training; its gradient is its (scaled) weight in the mini-batch's loss.

    Args:
        loss: of the mini-batch.
        targets: of the micro-batches.
        scaler: scales the gradients.
        before_backward: called once, by the worker that begins the first backward of the run, with two arguments:
            whether :meth:`correction` is certain to be 1, and the leaves of the loss.
    """

    can_wait = True

    def __init__(
        self,
        loss: MiniBatchLoss,
        targets: Sequence[Any],
        scaler: torch.amp.GradScaler | None = None,
        before_backward: BeforeBackward | None = None,
    ) -> None:
        self._loss = loss
        self._targets = targets
        self._scaler = scaler
        self._before_backward = before_backward
        self._roots: dict[int, list[Tensor]] = {}
        self._trains = False
        self._added = AddedByStages(loss.share_of_samples)
        self._seeds = _Seeds()
        self._lock = threading.Lock()

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Computes the loss of the micro-batch."""
        try:
            target = on_device_of(value, self._targets[micro_batch])
            taken = self._loss.take(micro_batch, value, target)
        except BaseException as error:
            add_note(error, f"{LAYER}in the forward of the loss")
            raise
        roots = [root for root in taken.roots if root.requires_grad]
        self._trains |= bool(roots)
        self._roots[micro_batch] = [root.detach() for root in roots]
        return tuple(edge for root in roots for edge in graph_cut.roots(root))

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the weights of the micro-batch's terms."""
        with self._lock:
            weights = self._loss.weights(micro_batch)
            if self._before_backward is not None:
                self._before_backward(self._loss.certain, self._loss.leaves.values())
                self._before_backward = None
        roots = self._roots.pop(micro_batch)
        return [self._seed(weight, root) for weight, root in zip(weights, roots, strict=True)]

    def correction(self) -> float:
        """Return the factor for the gradients of the run.

        Raises:
            LossError: no single factor corrects the gradients.
        """
        with self._lock:
            factor = self._loss.correction()
        if factor != 1.0 and self._added.have_graph:
            raise LossError(
                "layers add losses, and what the loss is divided by was only known when all losses were: use "
                "schedule='gpipe' with recompute='never'"
            )
        return factor

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Keeps their values."""
        return self._added.receive(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Their weights."""
        return [self._seed(weight, loss) for loss, weight in self._added.weighed(stage, micro_batch)]

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Return the loss of each micro-batch, and the auxiliary losses."""
        for micro_batch, loss in self._loss.values():
            yield micro_batch, "the loss", loss
        yield from self._added.losses()

    @property
    def trains(self) -> bool:
        """Whether a gradient of any loss has gone into the model."""
        return self._trains or self._added.have_graph

    @property
    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been received."""
        return with_added(self._loss.total(), self._added)

    def _seed(self, weight: float | Tensor, like: Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            seed = weight.to(like.device, like.dtype)
            return self._scaler.scale(seed).to(like.dtype) if self._scaler else seed
        key, made = (weight, like.dtype, like.device), self._seeds.made
        if key not in made:
            seed = torch.full((), weight, dtype=like.dtype, device=like.device)
            made[key] = self._scaler.scale(seed).to(like.dtype) if self._scaler else seed
        return made[key]


class BatchLossSink:
    """Computes the loss once, on the gathered output of all micro-batches, for ``reduction="batch"``.

    All forwards run before the first backward, which needs the gradient of the whole output.
    """

    can_wait = False  # the loss needs all outputs, before the second forward of any

    def __init__(
        self,
        loss: StepLoss,
        batch: MicroBatches,
        scaler: torch.amp.GradScaler | None = None,
        merge: Merger | None = None,
    ) -> None:
        self._loss_fn = loss.function
        self._batch, self._merge = batch, merge
        self._target = whole_target(batch)
        self._scaler = scaler
        self._outputs: dict[int, Any] = {}
        self._parts = len(batch.sizes)
        self._value: Tensor | None = None
        self._trains = False
        self._added = AddedByStages(lambda index: batch.sizes[index] / sum(batch.sizes))

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keep the output. After the last one, compute the loss and the gradients of all outputs."""
        output, roots = graph_cut.cut(value)
        self._trains |= bool(roots)
        if self._value is not None:  # a second forward
            return roots
        self._outputs[micro_batch] = output
        if len(self._outputs) == self._parts:
            try:
                self._compute()
            except BaseException as error:
                add_note(error, f"{LAYER}in the loss of the mini-batch")
                raise
        return roots

    def _compute(self) -> None:
        output = gather([self._outputs[index] for index in range(self._parts)], self._batch, self._merge)
        target = on_device_of(output, self._target)
        assert self._loss_fn is not None
        value = self._loss_fn(output) if target is None else self._loss_fn(output, target)
        loss = value_of(value)
        if torch.is_grad_enabled():
            check_gradient(loss, self._loss_fn)
            (self._scaler.scale(loss) if self._scaler else loss).backward()
        self._value = loss.detach()

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients of the micro-batch's part of the output."""
        return [leaf.grad for leaf in graph_cut.leaves(self._outputs.pop(micro_batch))]

    def correction(self) -> float:
        """None is needed."""
        return 1.0

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Keeps their values."""
        return self._added.receive(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Return their weights, scaled like the loss."""
        seeds = [torch.full_like(loss, weight) for loss, weight in self._added.weighed(stage, micro_batch)]
        return [self._scaler.scale(seed).to(seed.dtype) for seed in seeds] if self._scaler else seeds

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Return the loss, and the auxiliary losses."""
        if self._value is not None:
            yield 0, "the loss", self._value
        yield from self._added.losses()

    @property
    def trains(self) -> bool:
        """Whether a gradient of any loss has gone into the model."""
        return self._trains or self._added.have_graph

    @property
    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been received."""
        assert self._value is not None
        return with_added(self._value, self._added)


def whole_target(batch: MicroBatches) -> Any:
    """Return the target of the mini-batch.

    Raises:
        LossError: its parts cannot be joined.
    """
    if isinstance(batch.target, Apart) or not batch.by_samples:
        raise LossError(
            "reduction='batch' needs the target of all samples, which the parts of the split do not make up"
        )
    return batch.target


def on_device_of(output: Any, target: Any) -> Any:
    """Return the target on the device of the first tensor of the output."""
    found = tensors(output)
    return target if target is None or not found else graph_cut.move(target, found[0].device)


def with_added(total: Tensor, added: AddedByStages) -> Tensor:
    """Return the loss plus the auxiliary losses."""
    more = added.total()
    return total if more is None else total + more.to(total.device, total.dtype)


class _Seeds(threading.local):
    """Creates the gradients of losses, once per worker: streams of one worker do not wait for those of another."""

    def __init__(self) -> None:
        self.made: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


class OutputSink:
    """Keeps the outputs for the caller: for a forward alone, or one whose backward the caller runs later.

    Args:
        sizes: samples in each micro-batch.
    """

    can_wait = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self.outputs: list[Any] = [None] * len(sizes)
        self.received_gradients: Sequence[graph_cut.Gradients] = ()
        self.added = AddedByStages(lambda micro_batch: sizes[micro_batch] / sum(sizes))
        self.gradient_of_added: Tensor | None = None

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keep the output, detached from its graph."""
        self.outputs[micro_batch], roots = graph_cut.cut(value)
        return roots

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients that the caller has set."""
        return self.received_gradients[micro_batch]

    def correction(self) -> float:
        """Return 1: the caller provides the gradients."""
        return 1.0

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Keeps their values."""
        return self.added.receive(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradient that the caller has set for their sum, times their weights; None if it was not set."""
        gradient = self.gradient_of_added
        return [
            None if gradient is None else gradient.to(loss.device, loss.dtype) * weight
            for loss, weight in self.added.weighed(stage, micro_batch)
        ]

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Return the auxiliary losses."""
        return self.added.losses()
