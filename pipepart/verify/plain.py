"""Steps of the plain model in three ways, without stages, schedules or workers.

:func:`micro_batched` runs forward and backward of one micro-batch after the other: a pipeline must equal it bit for
bit. :func:`gathered` computes one loss over the outputs of all micro-batches, so it does not depend on how their losses
are combined. :func:`at_once` runs the whole mini-batch, which shows layers that mix samples. Random layers draw as in a
pipeline, by seed, step, micro-batch and layer, because draws from torch's one generator could not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..capture import flatten
from ..data.arguments import call
from ..data.gather import gather
from ..data.split import micro_batches_of
from ..loss import Reduction, StepLoss, collect_losses, value_of
from ..loss.auxiliary import AddedLosses
from ..runtime import MicroBatchLossSink, StepGradients
from ..runtime.replay.randomness import RngKeys
from .training import Step, Training, copy_of


def micro_batched(training: Training) -> Step:
    """A step of one micro-batch after the other. With ``reduction="batch"`` the loss is that of :func:`gathered`."""
    case = training.case
    if case.reduction == "batch":
        return gathered(training)
    loss = StepLoss(training.loss_fn, Reduction(case.reduction) if case.reduction else None)

    def step(x: Any, y: Any) -> Tensor:
        batch = case.split_up(x, y)
        gradients = StepGradients(training.model.parameters)
        sink = MicroBatchLossSink(loss, batch, before_backward=gradients.begin)
        draws = RngKeys()
        for index, part in enumerate(batch.inputs):
            with collect_losses() as added:
                output = _forward(training.layers, graph_cut.part(part), index, draws, training.drawn)
            roots = sink.receive(index, output)
            weights = sink.gradients(index) if roots else ()
            if added.found:
                roots = (*roots, *sink.receive_added(0, index, added.found))
                weights = (*weights, *sink.added_gradients(0, index))
            graph_cut.backward(roots, weights)
        gradients.finish(sink.correction())
        draws.finish()
        return sink.total

    return step


def gathered(training: Training) -> Step:
    """A step with one loss over the outputs of all micro-batches.

    A copy of the model computes the outputs first, so that here, too, each backward follows its own forward.
    """

    def step(x: Any, y: Any) -> Tensor:
        batch = training.case.split_up(x, y)
        parts = [graph_cut.part(part) for part in batch.inputs]
        ahead = flatten(copy_of(training.model, None, None)[0])
        draws = RngKeys()
        # Views of one copy, not copies of the parts: kernels may round otherwise where data is aligned otherwise.
        again = training.case.split_up(_cloned(x), y).inputs
        outputs = [
            graph_cut.cut(_forward(ahead, graph_cut.part(part), index, draws))[0]
            for index, part in enumerate(again)
        ]
        loss = _loss(training, gather(outputs, batch), batch.target)
        leaves = [leaf for output in outputs for leaf in graph_cut.leaves(output)]
        gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ())
        draws = RngKeys()
        for index, (part, samples) in enumerate(zip(parts, batch.sizes, strict=True)):
            with collect_losses() as added:
                _, roots = graph_cut.cut(_forward(training.layers, part, index, draws, training.drawn))
            extra = _weighed(added, samples / sum(batch.sizes))
            loss = loss.detach() + extra.detach().to(loss.dtype)
            more = graph_cut.roots(extra)
            found = [*(next(gradients) for _ in roots), *(torch.ones_like(extra) for _ in more)]
            graph_cut.backward((*roots, *more), found)
        draws.finish()
        return loss

    return step


def at_once(training: Training) -> Step:
    """A step of the whole mini-batch as one micro-batch."""

    def step(x: Any, y: Any) -> Tensor:
        whole = micro_batches_of(x, y, 1, training.case.split)
        target = whole.targets[0]
        draws = RngKeys()
        with collect_losses() as added:
            output = _forward(training.layers, graph_cut.part(whole.inputs[0]), 0, draws)
        loss = _loss(training, output, target) + _weighed(added, 1.0)
        draws.finish()
        if loss.requires_grad:
            loss.backward()
        return loss

    return step


def _weighed(added: AddedLosses, share: float) -> Tensor:
    """The losses that layers have added for a share of the samples, as they count in the mini-batch."""
    weighed = [loss * (share if reduction is Reduction.MEAN else 1.0) for loss, reduction in added.found]
    return torch.stack(weighed).sum() if weighed else torch.zeros(())


def _forward(
    layers: Sequence[tuple[str, nn.Module]],
    value: Any,
    micro_batch: int,
    draws: RngKeys,
    drawn: set[str] | None = None,
) -> Any:
    """The output of the layers for one micro-batch. Adds the layers that draw random numbers to ``drawn``."""
    for index, (name, layer) in enumerate(layers):
        with draws.of(index, micro_batch) as own:
            value = call(layer, value)
        if own.used and drawn is not None:
            drawn.add(name)
    return value


def _loss(training: Training, output: Any, target: Any) -> Tensor:
    if training.loss_fn is None:
        return value_of(output)
    return value_of(training.loss_fn(output) if target is None else training.loss_fn(output, target))


def _cloned(nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), nest)
