"""Steps of the plain model, by three ways that know nothing of stages, schedules and workers.

Micro-batch by micro-batch, forward and backward of each in turn, is what a pipeline has to equal bit for bit. With one
loss over the outputs of all micro-batches together, nothing hangs on how the micro-batches' losses are weighted. With
the mini-batch at once, layers are seen that mix samples. Layers draw as those of a pipeline do, by seed, step,
micro-batch and layer: drawn from torch's one generator the numbers would be others, and nothing could be compared.
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
from ..data.split import gather, micro_batches_of
from ..loss import Reduction, StepLoss, collect_losses, value_of
from ..loss.auxiliary import AddedLosses
from ..runtime import LossEnd
from ..runtime.replay.randomness import RngKeys
from .copies import copy_of
from .training import Step, Training


def micro_batched(training: Training) -> Step:
    """A step of one micro-batch after the other, each loss with its weight in that of the mini-batch."""
    case = training.case
    loss = StepLoss(training.loss_fn, Reduction(case.reduction) if case.reduction else None)

    def step(x: Any, y: Any) -> Tensor:
        batch = case.split_up(x, y)
        end = LossEnd(loss.parts(batch.target, batch.targets, batch.sizes), batch.targets)
        draws = RngKeys()
        for index, part in enumerate(batch.inputs):
            with collect_losses() as added:
                output = _forward(training.layers, graph_cut.part(part), index, draws, training.drawn)
            roots = end.receive(index, output)
            weights = end.gradients(index) if roots else ()
            if added.found:
                roots = (*roots, *end.receive_added(0, index, added.found))
                weights = (*weights, *end.added_gradients(0, index))
            graph_cut.backward(roots, weights)
        draws.finish()
        return end.total

    return step


def gathered(training: Training) -> Step:
    """A step with one loss, over the outputs of all micro-batches together.

    A copy runs ahead and makes the outputs, so that each micro-batch's backward follows its forward here, too.
    """

    def step(x: Any, y: Any) -> Tensor:
        batch = training.case.split_up(x, y)
        parts = [graph_cut.part(part) for part in batch.inputs]
        ahead = flatten(copy_of(training.model, None, None)[0])
        draws = RngKeys()
        outputs = [
            graph_cut.cut(_forward(ahead, part, index, draws))[0] for index, part in enumerate(_cloned(parts))
        ]
        loss = _loss(training, gather(outputs), batch.target)
        leaves = [leaf for output in outputs for leaf in graph_cut.leaves(output)]
        gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ())
        draws = RngKeys()
        for index, (part, samples) in enumerate(zip(parts, batch.sizes, strict=True)):
            with collect_losses() as added:
                _, roots = graph_cut.cut(_forward(training.layers, part, index, draws))
            extra = _weighed(added, samples / sum(batch.sizes))
            loss = loss.detach() + extra.detach().to(loss.dtype)
            more = graph_cut.roots(extra)
            found = [*(next(gradients) for _ in roots), *(torch.ones_like(extra) for _ in more)]
            graph_cut.backward((*roots, *more), found)
        draws.finish()
        return loss

    return step


def at_once(training: Training) -> Step:
    """A step of the whole mini-batch as one."""

    def step(x: Any, y: Any) -> Tensor:
        (whole,), (target,), _, _ = micro_batches_of(x, y, 1, training.case.split)
        draws = RngKeys()
        with collect_losses() as added:
            output = _forward(training.layers, graph_cut.part(whole), 0, draws)
        loss = _loss(training, output, target) + _weighed(added, 1.0)
        draws.finish()
        if loss.requires_grad:
            loss.backward()
        return loss

    return step


def _weighed(added: AddedLosses, share: float) -> Tensor:
    """What the layers have added for a part of the samples, as it counts in the mini-batch."""
    weighed = [loss * (share if reduction is Reduction.MEAN else 1.0) for loss, reduction in added.found]
    return torch.stack(weighed).sum() if weighed else torch.zeros(())


def _forward(
    layers: Sequence[tuple[str, nn.Module]],
    value: Any,
    micro_batch: int,
    draws: RngKeys,
    drawn: set[str] | None = None,
) -> Any:
    """The layers' output for one micro-batch; adds to ``drawn`` those that draw."""
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
