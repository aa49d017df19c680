"""Losses that divide sums by numbers of samples: exact, and followed once for each shape."""

import functools
import math
import random
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipepart.data.split import Whole
from pipepart.loss import LossError, Reduction, StepLoss
from pipepart.loss.follow import Follower
from pipepart.loss.function_key import function_key
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


class Scaled(torch.nn.Module):
    """A loss with options, one of which the caller changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.within = torch.nn.L1Loss()

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return self.within(o, t) * self.scale


def steps(loss_fn: Loss, calls: int, change: Callable[[int], object] = lambda step: None) -> int:
    """Take several steps of one loss, and check each; return how many micro-batches were followed."""
    followed: list[int] = []
    begin = Follower.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Follower, "begin", lambda *given: (followed.append(1), begin(*given))[1])
        loss = StepLoss(loss_fn)
        for step in range(calls):
            change(step)
            x, y = numbers()
            theirs, leaves = by_parts.whole(loss_fn, x, y)
            ours, mine = by_parts.by_parts(loss, x, y, 3)
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(mine, leaves, rtol=1e-11, atol=1e-13)
    return len(followed)


def test_a_loss_is_followed_once_for_all_steps_of_the_same_shapes() -> None:
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.double)
    losses: list[Loss] = [
        F.mse_loss,
        torch.nn.MSELoss(),
        Scaled(),
        lambda o, t: ((o - t).square() * weight).mean(),
        lambda o, t: (o.square() * (t > -9)).sum() / (t > -9).sum(),
        lambda o, t: ((o.square() * (t > 0)).sum(), (t > 0).sum()),
        sized,
    ]
    assert [steps(loss, 4) for loss in losses] == [1] * len(losses)


def test_what_a_loss_reads_may_change_between_steps() -> None:
    module, options = Scaled(), {"power": 2}

    def change(step: int) -> None:
        module.scale = 1.0 + step // 2
        options["power"] = 2 + step // 2

    assert steps(module, 4, change) == 2
    assert steps(lambda o, t: (o - t).abs().pow(options["power"]).mean(), 4, change) == 2
    ignored = torch.zeros(1, dtype=torch.long)  # what is read of a tensor may change without a new version
    assert steps(lambda o, t: F.mse_loss(o, t) * (1 + int(ignored)), 4) == 12


def test_a_target_that_all_micro_batches_share_belongs_to_its_step() -> None:
    def loss_fn(o: Tensor, t: Any) -> Tensor:
        values, weights = t
        return ((o - values).square() * weights).sum() / (weights * torch.ones_like(values)).sum()

    loss = StepLoss(loss_fn)
    for _ in range(3):
        x, y = numbers()
        weights = torch.rand(3, dtype=torch.double)
        theirs, leaves = by_parts.whole(loss_fn, x, (y, weights))
        ours, mine = by_parts.by_parts(loss, x, (y, Whole(weights)), 3)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(mine, leaves)


def test_losses_with_state_that_is_not_seen_are_followed_each_time() -> None:
    numbers_drawn = iter(range(100))
    generator = random.Random(3)
    for loss in (
        lambda o, t: F.mse_loss(o, t) + 0 * next(numbers_drawn),
        lambda o, t: F.mse_loss(o, t) + 0 * (generator.random() < 2),
    ):
        assert steps(loss, 2) == 6


def test_a_key_holds_all_that_a_loss_reads() -> None:
    def scaled(factor: float) -> Loss:
        return lambda o, t: F.mse_loss(o, t) * factor

    one, other = function_key(scaled(1.0)), function_key(scaled(2.0))
    assert one is not None
    assert other is not None
    assert one.tokens != other.tokens
    again = function_key(partial(F.cross_entropy, ignore_index=3))
    assert again is not None
    assert again.tokens == function_key(partial(F.cross_entropy, ignore_index=3)).tokens  # type: ignore[union-attr]
    assert again.tokens != function_key(partial(F.cross_entropy, ignore_index=4)).tokens  # type: ignore[union-attr]
    for unseen in (
        random.Random(1),
        open,
        iter([1]),
        torch.Generator(),
        lambda o, t: __import__("time").time(),
    ):
        assert function_key(partial(max, unseen)) is None


def test_a_key_holds_what_modules_and_attributes_of_functions_hold() -> None:
    settings = ModuleType("settings")
    settings.mode, settings.inner = "mean", ModuleType("inner")  # type: ignore[attr-defined]
    settings.inner.mode = "mean"  # type: ignore[attr-defined]

    def read(o: Tensor, t: Tensor, where: Any = settings) -> Tensor:
        return F.mse_loss(o, t, reduction=where.mode)

    @functools.wraps(F.mse_loss)
    def named_like_torchs(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o, t, reduction=settings.inner.mode)

    before = [function_key(loss) for loss in (read, named_like_torchs)]
    settings.mode = settings.inner.mode = "sum"  # type: ignore[attr-defined]
    for key, loss in zip(before, (read, named_like_torchs), strict=True):
        after = function_key(loss)
        assert key is None or after is None or key.tokens != after.tokens


def test_a_key_holds_functions_that_take_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o, t)

    before = function_key(loss)
    assert before is not None
    monkeypatch.setattr(F, "mse_loss", partial(F.mse_loss, reduction="sum"))
    after = function_key(loss)
    assert after is None or after.tokens != before.tokens


def test_settings_of_torch_have_no_key() -> None:
    assert function_key(lambda o, t: torch.get_default_dtype()) is None
    assert function_key(lambda o, t: torch.is_autocast_enabled("cpu")) is None


def test_numbers_that_differ_for_the_mini_batch_are_refused() -> None:
    x, y = numbers()
    with pytest.raises(LossError, match="number of samples"):
        by_parts.by_parts(lambda o, t: (o - t).square().sum() / max(len(o), 4), x, y, 3)
