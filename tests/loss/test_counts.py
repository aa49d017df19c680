"""Losses that divide sums by numbers of samples: exact, and followed once for each shape."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipepart.loss import Reduction
from pipepart.loss.follow import Follower
from tests.loss import by_parts
from tests.loss.batches import numbers, tokens

Loss = Callable[[Tensor, Tensor], Any]

# Numbers that are in proportion to the samples.
SIZES: list[Callable[[Tensor, Tensor], Any]] = [
    *(lambda o, t: o.shape[0], lambda o, t: o.size(0), lambda o, t: o.numel(), lambda o, t: len(o)),
    *(lambda o, t: o.shape.numel(), lambda o, t: math.prod(o.shape), lambda o, t: float(np.prod(o.shape))),
    *(lambda o, t: 2 * len(t), lambda o, t: (t > 0).sum().item(), lambda o, t: max(int((t > 0).sum()), 1)),
    *(lambda o, t: (t > 0).sum().clamp(min=1), lambda o, t: torch.clamp((t > 0).double().sum(), 1.0)),
]


def counted(o: Tensor, t: Tensor) -> Tensor:
    """Reads the number of samples, and divides by a constant that may equal it."""
    rows = F.mse_loss(o, t, reduction="none").sum(1)
    return (rows.sum() / len(o) + rows.mean()) / 2 + F.l1_loss(o, t, reduction="sum") / 2


def guarded(o: Tensor, t: Tensor) -> Tensor:
    kept = t != -100
    return F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum") / max(int(kept.sum()), 1)


@pytest.mark.parametrize("micro_batches", [2, 3, 6])
@pytest.mark.parametrize("case", range(len(SIZES)))
def test_a_sum_is_divided_by_a_number_of_samples(case: int, micro_batches: int) -> None:
    by_parts.check(
        lambda o, t: F.mse_loss(o, t, reduction="sum") / SIZES[case](o, t), *numbers(), micro_batches
    )


@pytest.mark.parametrize("micro_batches", [2, 3, 4, 6])
def test_a_constant_that_equals_the_number_of_samples_stays_one(micro_batches: int) -> None:
    by_parts.check(counted, *numbers(), micro_batches)


@pytest.mark.parametrize("empty", [slice(0, 2), slice(2, 6), slice(0, 6)])
@pytest.mark.parametrize("loss", [guarded, lambda o, t: guarded(o, t) * 2])
def test_micro_batches_in_which_nothing_counts(loss: Loss, empty: slice) -> None:
    x, y = tokens()
    y[empty] = -100
    by_parts.check(loss, x, y, 3)


def test_a_penalty_of_weights_counts_once_beside_a_declared_mean() -> None:
    weight = torch.ones(3, dtype=torch.double, requires_grad=True)
    x, y = numbers()
    loss, gradients = by_parts.by_parts(
        lambda o, t: F.mse_loss(o, t) + weight.square().sum(), x, y, 3, reduction=Reduction.MEAN
    )
    (plain,) = torch.autograd.grad(weight.square().sum(), weight)
    torch.testing.assert_close(weight.grad, plain)
    whole, others = by_parts.whole(lambda o, t: F.mse_loss(o, t) + weight.square().sum(), x, y)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradients, others)


def test_a_micro_batch_of_known_shapes_is_not_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[int] = []
    begin = Follower.begin
    monkeypatch.setattr(Follower, "begin", lambda self, *given: (followed.append(1), begin(self, *given))[1])
    for loss in (F.mse_loss, lambda o, t: (o - t).square().mean() + 0.1 * o.abs().mean(), sized):
        followed.clear()
        by_parts.by_parts(loss, *numbers(), 3)
        assert len(followed) == 1


def sized(o: Tensor, t: Tensor) -> Tensor:
    return (o - t).square().sum() / o.shape[0]
