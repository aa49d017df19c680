"""Loss sinks: receive the outputs of the last stage and return their gradients."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from schedules import Schedule, stepped_together

from ..autograd import graph_cut
from ..autograd.own_copy import tensors
from ..data.gather import Merger, gather
from ..data.split import Apart, MicroBatches
from ..loss import (
    Added,
    LossError,
    MiniBatchLoss,
    Reduction,
    StepLoss,
    Taken,
    check_gradient,
    value_of,
    without_slack,
)
from ..planning.request import runs_forwards_first
from .failure.notes import LAYER, add_note

BeforeBackward = Callable[[bool, Iterable[Tensor]], None]


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
            "replicas or begins backwards before: "
            "plan = pipepart.plan(profile, cluster, reduction='batch')"
        )


class Share(NamedTuple):
    """What one rank knows of the loss of a mini-batch.

    Attributes:
        added: losses that layers of its stages added.
        total: of the last stage's rank: the loss without them.
        correction: the factor for the gradients.
        trains: whether a gradient of any loss has gone into the model.
        refusal: why the gradients of the mini-batch are not right, if they are not.
    """

    added: Mapping[tuple[int, int], list[tuple[Tensor, float, bool]]]
    total: Tensor | None = None
    correction: float = 1.0
    trains: bool = False
    refusal: str = ""


class LossSink(ABC):
    """Base of the sinks: the outputs and the auxiliary losses of one run, and the gradients that backwards start from.

    A sink is used by the workers during a run, and by the caller after it. Each worker writes the auxiliary losses of
    its own stages. A recomputed forward writes the same values again.

    Args:
        sizes: the samples in each micro-batch.
        groups: the micro-batches of each optimizer step, which form a mini-batch; None for one group of all.
        scaler: scales the gradients.
        keep_outputs: keep the outputs of the last stage, detached.
        loss_weight: multiplies the gradients.

    Attributes:
        can_wait: whether an output that is made twice need only be received the second time.
        receiving: held while an output is received: replicas have several last stages, on several workers.
        outputs: of the micro-batches, without a graph, where they are kept.
        added_have_graph: whether any auxiliary loss can be differentiated.
    """

    can_wait = False

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Sequence[range] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        keep_outputs: bool = False,
        loss_weight: float = 1.0,
    ) -> None:
        self.receiving = threading.Lock()
        self.outputs: list[Any] = [None] * len(sizes)
        self.added_have_graph = False
        groups = groups or [range(len(sizes))]
        totals = [sum(sizes[group.start : group.stop]) for group in groups]
        self._shares = [
            sizes[index] / total for group, total in zip(groups, totals, strict=True) for index in group
        ]
        self._scaler = scaler
        self._weight = loss_weight
        self._keeps = keep_outputs
        self._trains = False
        self._known: Share | None = None
        self._added: dict[tuple[int, int], list[tuple[Tensor, float, bool]]] = {}
        self._seeds = _Seeds()

    @abstractmethod
    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Receive the output of one micro-batch; return the roots: tensors where its gradients enter the graph."""

    @abstractmethod
    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients for those roots."""

    def correction(self) -> float:
        """Return the factor for the gradients of the run, after all micro-batches were received."""
        return 1.0

    def receive_added(
        self, stage: int, micro_batch: int, losses: Sequence[Added]
    ) -> tuple[GradientEdge, ...]:
        """Receive the auxiliary losses of a stage's layers, on that stage's worker; return their roots."""
        self._added[stage, micro_batch] = [
            (
                without_slack(loss.detach()),
                1.0 if reduction is Reduction.SUM else self._shares[micro_batch],
                loss.requires_grad,
            )
            for loss, reduction in losses
        ]
        roots = tuple(root for loss, _ in losses for root in graph_cut.roots(loss))
        self.added_have_graph |= bool(roots)
        return roots

    def added_gradients(self, stage: int, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients for those roots."""
        return [
            self._added_seed(weight, loss)
            for loss, weight, has_graph in self._added[stage, micro_batch]
            if has_graph
        ]

    def added_total(self) -> Tensor | None:
        """Return the sum of the auxiliary losses, each with its weight; None if there are none."""
        weighed = [(loss, weight) for key in sorted(self._added) for loss, weight, _ in self._added[key]]
        if not weighed:
            return None
        total = weighed[0][0] * weighed[0][1]
        for loss, weight in weighed[1:]:
            total = total + (loss * weight).to(total.device)
        return total

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Return micro-batch, description and value of everything received that counts in the loss."""
        for stage, micro_batch in sorted(self._added):
            for loss, *_ in self._added[stage, micro_batch]:
                yield micro_batch, f"a loss that a layer of stage {stage} adds", loss

    @property
    def is_complete(self) -> bool:
        """Whether the last stage's outputs of all micro-batches were received, so that :meth:`correction` is known."""
        return False

    def adopt_correction(self, factor: float) -> None:
        """Take over the factor from the rank of the last stage."""
        self._known = Share({}, correction=factor)

    def taken(self) -> dict[int, Taken]:
        """Return the losses of the micro-batches that were received here, for the ranks of other replicas."""
        return {}

    def adopt_taken(self, taken: Mapping[int, Taken]) -> None:
        """Take over the losses of micro-batches that other ranks received.

        Raises:
            LossError: they were computed in another way.
        """
        assert not taken

    def share(self, is_last: bool) -> Share:
        """Return what this rank knows of the loss, if the stages are on several; the last stage's knows most."""
        if not is_last:
            return Share(self._added, trains=self.trains)
        try:
            return Share(self._added, self._own_total(), self.correction(), self.trains)
        except LossError as error:
            return Share(self._added, refusal=str(error))

    def adopt(self, shares: Sequence[Share], last: int) -> None:
        """Take over what the other ranks know; ``last`` is the rank of the last stage."""
        for share in shares:
            self._added.update(share.added)
            self._trains |= share.trains
            self.added_have_graph |= any(graph for row in share.added.values() for *_, graph in row)
        self._known = shares[last]

    @property
    def trains(self) -> bool:
        """Whether a gradient of any loss has gone into the model."""
        return self._trains or self.added_have_graph

    def _keep(self, micro_batch: int, value: Any) -> None:
        if self._keeps:
            self.outputs[micro_batch] = pytree.tree_map_only(Tensor, Tensor.detach, value)

    def _added_seed(self, weight: float, loss: Tensor) -> Tensor | None:
        return self._seed(weight, loss)

    def _seed(self, weight: float | Tensor, like: Tensor | _Kind) -> Tensor:
        """Return a weight as a gradient of ``like``, scaled."""
        if isinstance(weight, Tensor):
            return self._scaled(weight.to(like.device, like.dtype))
        key, made = (weight, like.dtype, like.device), self._seeds.made
        if key not in made:
            made[key] = self._scaled(torch.full((), weight, dtype=like.dtype, device=like.device))
        return made[key]

    def _scaled(self, seed: Tensor) -> Tensor:
        seed = seed if self._weight == 1.0 else seed * self._weight
        return self._scaler.scale(seed).to(seed.dtype) if self._scaler else seed

    def _own_total(self) -> Tensor | None:
        """Return the loss without the auxiliary losses; None if this sink computes none."""
        return self._known and self._known.total

    def _with_added(self, parts: int = 1) -> Tensor:
        """Return the loss plus the auxiliary losses of as many mini-batches, a mean over these."""
        total = self._own_total()
        assert total is not None
        added = self.added_total()
        return total if added is None else total + added.to(total.device, total.dtype) / parts


class _Kind(NamedTuple):
    """What a gradient must have in common with its tensor."""

    dtype: torch.dtype
    device: torch.device


class _Seeds(threading.local):
    """Creates the gradients of losses, once per worker: streams of one worker do not wait for those of another."""

    def __init__(self) -> None:
        self.made: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


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
    ) -> None:
        super().__init__(batch.sizes, groups, scaler, keep_outputs, loss_weight)
        groups = groups or [range(len(batch.sizes))]
        self._losses = [MiniBatchLoss(loss, _of_group(batch, group), shared_out) for group in groups]
        self._places = [
            (one, number)
            for one, group in zip(self._losses, groups, strict=True)
            for number in range(len(group))
        ]
        self._targets = batch.targets
        self._before_backward = before_backward if len(groups) == 1 else None
        self._roots: dict[int, list[_Kind]] = {}
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Compute the loss of the micro-batch."""
        self._keep(micro_batch, value)
        loss, number = self._places[micro_batch]
        try:
            taken = loss.take(number, value, on_device_of(value, self._targets[micro_batch]))
        except BaseException as error:
            add_note(error, f"{LAYER}in the forward of the loss")
            raise
        if len(self._losses) > 1 and loss.correction() != 1.0:
            raise LossError(
                "what the loss is divided by was only known behind the first backward of its group, too late for an "
                "asynchronous schedule: return (sum, count) with a count of the target alone"
            )
        roots = [root for root in taken.roots if root.requires_grad]
        self._trains |= bool(roots)
        self._seen.add(micro_batch)
        self._roots[micro_batch] = [_Kind(root.dtype, root.device) for root in roots]
        return tuple(edge for root in roots for edge in graph_cut.roots(root))

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the weights of the micro-batch's terms."""
        loss, number = self._places[micro_batch]
        with self._lock:
            weights = loss.weights(number)
            if self._before_backward is not None:
                self._before_backward(loss.certain, loss.leaves.values())
                self._before_backward = None
        roots = self._roots.pop(micro_batch)
        return [self._seed(weight, root) for weight, root in zip(weights, roots, strict=True)]

    def taken(self) -> dict[int, Taken]:
        """Return the losses of the micro-batches that were received here; replicas are in one group."""
        return self._losses[0].taken()

    def adopt_taken(self, taken: Mapping[int, Taken]) -> None:
        """Take over the losses of micro-batches that other ranks received."""
        self._losses[0].adopt(taken)

    @property
    def is_complete(self) -> bool:
        """Whether the loss of every micro-batch was taken."""
        return len(self._seen) == len(self._places)

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
                factor = self._losses[0].correction()
        if factor != 1.0 and self.added_have_graph:
            raise LossError(
                "layers add losses, and what the loss is divided by was only known when all losses were: use "
                "schedule='gpipe' with recompute='never'"
            )
        return factor

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Return the loss of each micro-batch, and the auxiliary losses."""
        for micro_batch, (loss, number) in enumerate(self._places):
            if (value := loss.value(number)) is not None:
                yield micro_batch, "the loss", value
        yield from super().losses()

    @property
    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been received; of several groups the mean."""
        return self._with_added(len(self._losses))

    def _own_total(self) -> Tensor | None:
        if self._known is not None:
            return self._known.total
        totals = [loss.total() for loss in self._losses]
        return totals[0] if len(totals) == 1 else torch.stack(totals).mean()


class BatchLossSink(LossSink):
    """Computes the loss once, on the gathered output of all micro-batches, for ``reduction="batch"``.

    All forwards run before the first backward, which needs the gradient of the whole output.
    """

    def __init__(
        self,
        loss: StepLoss,
        batch: MicroBatches,
        scaler: torch.amp.GradScaler | None = None,
        merge: Merger | None = None,
        keep_outputs: bool = False,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__(batch.sizes, None, scaler, keep_outputs, loss_weight)
        if isinstance(batch.target, Apart) or not batch.by_samples:
            raise LossError(
                "reduction='batch' needs the target of all samples, which the parts of the split do not make up"
            )
        self._loss_fn = loss.function
        self._batch, self._merge = batch, merge
        self._received: dict[int, Any] = {}
        self._value: Tensor | None = None

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        """Keep the output. After the last one, compute the loss and the gradients of all outputs."""
        self._keep(micro_batch, value)
        output, roots = graph_cut.cut(value)
        self._trains |= bool(roots)
        if self._value is not None:  # a second forward
            return roots
        self._received[micro_batch] = output
        if len(self._received) == len(self._batch.sizes):
            try:
                self._compute()
            except BaseException as error:
                add_note(error, f"{LAYER}in the loss of the mini-batch")
                raise
        return roots

    @property
    def is_complete(self) -> bool:
        """Whether the loss was computed."""
        return self._value is not None

    def _compute(self) -> None:
        received = [self._received[index] for index in range(len(self._received))]
        output = gather(received, self._batch, self._merge)
        target = on_device_of(output, self._batch.target)
        assert self._loss_fn is not None
        loss = value_of(self._loss_fn(output) if target is None else self._loss_fn(output, target))
        if torch.is_grad_enabled():
            check_gradient(loss, self._loss_fn)
            weighted = loss if self._weight == 1.0 else loss * self._weight
            (self._scaler.scale(weighted) if self._scaler else weighted).backward()
        self._value = without_slack(loss.detach())

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        """Return the gradients of the micro-batch's part of the output."""
        return [leaf.grad for leaf in graph_cut.leaves(self._received.pop(micro_batch))]

    def losses(self) -> Iterator[tuple[int, str, Tensor]]:
        """Return the loss, and the auxiliary losses."""
        if self._value is not None:
            yield 0, "the loss", self._value
        yield from super().losses()

    @property
    def total(self) -> Tensor:
        """The loss of the mini-batch, when all micro-batches have been received."""
        return self._with_added()

    def _own_total(self) -> Tensor | None:
        return self._value if self._known is None else self._known.total


def on_device_of(output: Any, target: Any) -> Any:
    """Return the target on the device of the first tensor of the output."""
    found = tensors(output)
    return target if target is None or not found else graph_cut.move(target, found[0].device)


def _of_group(batch: MicroBatches, group: range) -> MicroBatches:
    """Return some micro-batches as a mini-batch of their own."""
    if len(group) == len(batch.sizes):
        return batch
    part = slice(group.start, group.stop)
    inputs, targets, sizes = batch.inputs[part], batch.targets[part], batch.sizes[part]
    return MicroBatches(inputs, targets, sizes, Apart(), batch.by_samples)
