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

from .. import boundary
from ..capture import flatten
from ..loss import Reduction, StepLoss, value_of
from ..microbatch import batch_size, gather, sizes, split
from ..runtime import LossEnd
from ..runtime.randomness import Draws
from .copies import copy_of
from .training import Step, Training


def micro_batched(training: Training) -> Step:
    """A step of one micro-batch after the other, each loss with its weight in that of the mini-batch."""
    case = training.case
    loss = StepLoss(training.loss_fn, Reduction(case.reduction) if case.reduction else None)

    def step(x: Any, y: Any) -> Tensor:
        parts = _parts(training, x)
        targets = split(y, parts)
        end = LossEnd(loss.parts(y, targets, sizes(batch_size(x), parts)), targets)
        draws = Draws()
        for index, part in enumerate(split(x, parts)):
            output = _forward(training.layers, boundary.part(part), index, draws, training.drawn)
            roots = end.receive(index, output)
            if roots:
                torch.autograd.backward(roots, end.gradients(index))
        draws.finish()
        return end.total

    return step


def gathered(training: Training) -> Step:
    """A step with one loss, over the outputs of all micro-batches together.

    A copy runs ahead and makes the outputs, so that each micro-batch's backward follows its forward here, too.
    """

    def step(x: Any, y: Any) -> Tensor:
        parts = [boundary.part(part) for part in split(x, _parts(training, x))]
        ahead = flatten(copy_of(training.model, None, None)[0])
        draws = Draws()
        outputs = [
            boundary.cut(_forward(ahead, part, index, draws))[0] for index, part in enumerate(_cloned(parts))
        ]
        loss = _loss(training, gather(outputs), y)
        leaves = [leaf for output in outputs for leaf in boundary.leaves(output)]
        gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ())
        draws = Draws()
        for index, part in enumerate(parts):
            _, roots = boundary.cut(_forward(training.layers, part, index, draws))
            boundary.backward(roots, [next(gradients) for _ in roots])
        draws.finish()
        return loss

    return step


def at_once(training: Training) -> Step:
    """A step of the whole mini-batch as one."""

    def step(x: Any, y: Any) -> Tensor:
        draws = Draws()
        loss = _loss(training, _forward(training.layers, boundary.part(x), 0, draws), y)
        draws.finish()
        if loss.requires_grad:
            loss.backward()
        return loss

    return step


def _parts(training: Training, x: Any) -> int:
    return min(training.case.micro_batches, batch_size(x))


def _forward(
    layers: Sequence[tuple[str, nn.Module]],
    value: Any,
    micro_batch: int,
    draws: Draws,
    drawn: set[str] | None = None,
) -> Any:
    """The layers' output for one micro-batch; adds to ``drawn`` those that draw."""
    for index, (name, layer) in enumerate(layers):
        with draws.of(index, micro_batch) as own:
            value = layer(value)
        if own.used and drawn is not None:
            drawn.add(name)
    return value


def _loss(training: Training, output: Any, target: Any) -> Tensor:
    if training.loss_fn is None:
        return value_of(output)
    return value_of(training.loss_fn(output) if target is None else training.loss_fn(output, target))


def _cloned(nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), nest)
