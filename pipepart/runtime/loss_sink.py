"""The far end of the pipeline: what becomes of the last stage's output, and where its gradient comes from."""

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


class End(Protocol):
    """Used by the worker of the last stage while a run goes on, and by the caller once it is over.

    Attributes:
        can_wait: whether an output that is made twice need only be received the second time.
    """

    can_wait: bool

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Takes the output of one micro-batch; returns where its gradients enter the last stage's graph."""
        ...

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """The gradients for those roots."""
        ...

    def correction(self) -> float:
        """What the gradients of the run are to be multiplied by, when all micro-batches have been received."""
        ...

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Takes what the layers of any stage have added to the loss, on that stage's worker; returns its roots."""
        ...

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """The gradients for those roots."""
        ...

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """What has been received that counts in the loss: its micro-batch, what it is, and its value."""
        ...


class LossEnd:
    """Training: each micro-batch's loss, whose gradient is its weight in the loss of the mini-batch, scaled or not.

    Args:
        loss: of the mini-batch.
        targets: of the micro-batches.
        scaler: scales the gradients.
        before_backward: called once, by the worker that is about to begin the first backward of the run: with whether
            the gradients will be right as they are, so that :meth:`correction` is 1, and with leaves that the loss has.
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
        """The weights of the micro-batch's terms."""
        with self._lock:
            weights = self._loss.weights(micro_batch)
            if self._before_backward is not None:
                self._before_backward(self._loss.certain, self._loss.leaves.values())
                self._before_backward = None
        roots = self._roots.pop(micro_batch)
        return [self._seed(weight, root) for weight, root in zip(weights, roots, strict=True)]

    def correction(self) -> float:
        """What the gradients of the run are to be multiplied by before they are used.

        Raises:
            LossError: they cannot be put right by one factor.
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
        """The loss of each micro-batch, and what layers have added."""
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


class BatchLossEnd:
    """Training with ``reduction="batch"``: the loss is computed once, on the gathered output of all micro-batches.

    All forwards run before the first backward, so that the gradient of the whole output is there for it.
    """

    can_wait = False  # an output is needed long before its backward, and so before its second forward

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
        """Keeps the output, and with the last computes the loss and the gradients of all outputs."""
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
        """Those of the micro-batch's part of the output."""
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
        """Their weights, scaled as the loss is."""
        seeds = [torch.full_like(loss, weight) for loss, weight in self._added.weighed(stage, micro_batch)]
        return [self._scaler.scale(seed).to(seed.dtype) for seed in seeds] if self._scaler else seeds

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """The loss, and what layers have added."""
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
    """The target of the mini-batch.

    Raises:
        LossError: its parts cannot be joined.
    """
    if isinstance(batch.target, Apart) or not batch.by_samples:
        raise LossError(
            "reduction='batch' needs the target of all samples, which the parts of the split do not make up"
        )
    return batch.target


def on_device_of(output: Any, target: Any) -> Any:
    """The target on the device of the first tensor of the output."""
    found = tensors(output)
    return target if target is None or not found else graph_cut.move(target, found[0].device)


def with_added(total: Tensor, added: AddedByStages) -> Tensor:
    """A loss with what layers have added to it."""
    more = added.total()
    return total if more is None else total + more.to(total.device, total.dtype)


class _Seeds(threading.local):
    """The gradients of losses that a worker has made: on its own streams, which no other worker's wait for."""

    def __init__(self) -> None:
        self.made: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


class OutputEnd:
    """Forward only, or with a backward to come: the outputs themselves.

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
        """Keeps the output, cut from its graph."""
        self.outputs[micro_batch], roots = graph_cut.cut(value)
        return roots

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """What the caller has set."""
        return self.received_gradients[micro_batch]

    def correction(self) -> float:
        """None is needed: the caller gives the gradients."""
        return 1.0

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Keeps their values."""
        return self.added.receive(stage, micro_batch, losses)

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """What the caller has set for their total, times their weights; None where nobody has asked for it."""
        gradient = self.gradient_of_added
        return [
            None if gradient is None else gradient.to(loss.device, loss.dtype) * weight
            for loss, weight in self.added.weighed(stage, micro_batch)
        ]

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """What layers have added."""
        return self.added.losses()
