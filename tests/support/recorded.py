"""Trains recorded models as pipelines that are cut by hand, beside the plain model on the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipepart import Arguments, Pipeline
from pipepart.capture import Chain, chain_of
from pipepart.capture.deep_copies import deep_copies
from pipepart.data.arguments import call
from pipepart.data.recorded import entered
from pipepart.data.split import micro_batches_of
from tests.support import plain
from tests.support.chains import cut_by_hand

LossFunction = Callable[..., Any] | None


def chain_for(
    model: nn.Module, sample: Any, *, loss_fn: LossFunction = None, parts: int = 2, **options: Any
) -> Chain:
    """The chain of a model, recorded with the first of ``parts`` micro-batches of a sample."""
    chain = chain_of(model, split_loss=loss_fn is None, **options)
    batch = micro_batches_of(Arguments.of(sample).input, None, parts)
    entered(chain, batch)
    return chain


def borders_of(layers: int, stages: int) -> list[int]:
    """The borders of stages with as many layers each, give or take one."""
    return [layers * index // stages for index in range(1, stages)]


def piped(
    model: nn.Module,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: LossFunction = None,
    stages: int = 2,
    borders: Sequence[int] | None = None,
    parts: int = 2,
    **how: Any,
) -> Pipeline:
    """A pipeline of a model whose layers are recorded with a sample; ``how`` as for ``cut_by_hand``."""
    chain = chain_for(model, sample, loss_fn=loss_fn, parts=parts)
    borders = borders_of(len(chain.layers), stages) if borders is None else borders
    return cut_by_hand(chain, borders, loss_fn=loss_fn, micro_batches=parts, **how)


def plainly(
    model: nn.Module,
    sample: Any,
    *,
    target: Any = None,
    loss_fn: LossFunction = None,
    parts: int = 2,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Run forward and backward of one micro-batch after the other; return the loss of the mini-batch."""
    batch = micro_batches_of(Arguments.of(sample).input, target, parts)
    weights = [size / sum(batch.sizes) for size in batch.sizes] if weights is None else weights
    total: Any = 0.0
    for part, own, weight in zip(batch.inputs, batch.targets, weights, strict=True):
        output = call(model, part)
        loss = own_loss(output) if loss_fn is None else loss_fn(output, own)
        loss.backward(torch.tensor(weight, dtype=loss.dtype))
        total = total + loss.detach() * weight
    return total


def own_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return next(one for one in output if one is not None and not one.dim())
    return output["loss"] if isinstance(output, dict) else output.loss


def differing(model: nn.Module, other: nn.Module) -> list[str]:
    """Names of parameters whose gradients differ in a bit, and of buffers that differ."""
    one, two = (plain.gradients(each) | dict(each.named_buffers()) for each in (model, other))
    return plain.differing(one, two)


def assert_same_step(model: nn.Module, sample: Any, **settings: Any) -> None:
    """Assert that a step of a pipeline has the loss and the gradients of the plain micro-batches, bit for bit."""
    (reference,) = deep_copies(model)
    weights = settings.pop("weights", None)
    seed = settings.pop("seed", None)
    target, loss_fn, parts = (
        settings.get(key, other) for key, other in (("target", None), ("loss_fn", None), ("parts", 2))
    )
    with piped(model, sample, **settings) as pipe:
        if seed is not None:
            torch.manual_seed(seed)
        loss = pipe.step(Arguments.of(sample), target=target)
    expected = plainly(reference, sample, target=target, loss_fn=loss_fn, parts=parts, weights=weights)
    assert differing(model, reference) == []
    torch.testing.assert_close(loss, expected.to(loss.dtype), rtol=1e-6, atol=0)


def assert_that_of_the_whole(
    model: nn.Module,
    reference: nn.Module,
    loss: Tensor,
    expected: Tensor,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Assert that loss and gradients of a pipeline are those of the plain model's loss, up to rounding.

    The losses may differ by a millionth, or by ``rtol`` if that is less.
    """
    if expected.requires_grad:
        expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=min(rtol, 1e-6), atol=0, check_dtype=False)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=rtol, atol=atol)
