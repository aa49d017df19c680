"""Losses that divide sums by numbers of samples are exact, and a loss is analysed once for all its steps."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipepart.data.split import Whole
from pipepart.loss import LossError, Reduction, StepLoss
from pipepart.loss.analysis import Analysis
from pipepart.loss.terms import Term
from tests.loss import by_parts
from tests.loss.batches import CLASSES, classes, numbers, tokens

Loss = Callable[[Tensor, Tensor], Any]

# Numbers that are in proportion to the samples, and counts.
SIZES: list[Callable[[Tensor, Tensor], Any]] = [
    *(lambda o, t: o.shape[0], lambda o, t: o.size(0), lambda o, t: o.numel(), lambda o, t: len(o)),
    *(lambda o, t: o.shape.numel(), lambda o, t: math.prod(o.shape), lambda o, t: float(np.prod(o.shape))),
    *(lambda o, t: 2 * len(t), lambda o, t: torch.clamp((t > 0).double().sum(), 1.0)),
    lambda o, t: (t > 0).sum().clamp(min=1),
]


def counted(o: Tensor, t: Tensor) -> Tensor:
    """Reads the number of samples, and divides by a constant that may equal it."""
    rows = F.mse_loss(o, t, reduction="none").sum(1)
    return (rows.sum() / len(o) + rows.mean()) / 2 + F.l1_loss(o, t, reduction="sum") / 2


def guarded(o: Tensor, t: Tensor) -> Tensor:
    kept = t != -100
    return F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum") / kept.sum().clamp(min=1)


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
@pytest.mark.parametrize(
    "loss", [guarded, lambda o, t: guarded(o, t) * 2, lambda o, t: F.cross_entropy(o.mT, t)]
)
def test_micro_batches_in_which_nothing_counts(loss: Loss, empty: slice) -> None:
    x, y = tokens()
    y[empty] = -100
    by_parts.check(loss, x, y, 3)


@pytest.mark.parametrize("reduction", [None, Reduction.MEAN])
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_a_penalty_of_weights_counts_once(reduction: Reduction | None, micro_batches: int) -> None:
    weight = torch.ones(3, dtype=torch.double, requires_grad=True)

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o, t) + 0.1 * weight.square().sum()

    x, y = numbers()
    loss, gradients = by_parts.by_parts(loss_fn, x, y, micro_batches, reduction=reduction)
    (plain,) = torch.autograd.grad(loss_fn(x, y), weight)
    torch.testing.assert_close(weight.grad, plain)
    whole, others = by_parts.whole(loss_fn, x, y)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradients, others)


def sized(o: Tensor, t: Tensor) -> Tensor:
    return (o - t).square().sum() / o.shape[0]


def test_calls_that_are_the_same_are_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[int] = []
    begin = Analysis.__init__
    monkeypatch.setattr(Analysis, "__init__", lambda *given: (analysed.append(1), begin(*given))[1])
    for loss_fn in (F.mse_loss, lambda o, t: (o - t).square().mean() + 0.1 * o.abs().mean(), sized):
        analysed.clear()
        loss = StepLoss(loss_fn)
        for _ in range(3):
            by_parts.by_parts(loss, *numbers(), 3)
        assert len(analysed) == 1


class Scaled(nn.Module):
    """A loss with options, one of which the caller changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.within = nn.L1Loss()

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return self.within(o, t) * self.scale


def check_steps(loss_fn: Loss, change: Callable[[int], object], batch: Callable[[], Any] = numbers) -> None:
    """Take several steps of one loss, and check each."""
    loss = StepLoss(loss_fn)
    for step in range(4):
        change(step)
        x, y = batch()
        theirs, leaves = by_parts.whole(loss_fn, x, y)
        ours, mine = by_parts.by_parts(loss, x, y, 3)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(mine, leaves, rtol=1e-11, atol=1e-13)


def test_what_a_loss_reads_may_change_between_steps() -> None:
    module, options, ignored = Scaled(), {"power": 2}, torch.zeros(1, dtype=torch.long)

    def change(step: int) -> None:
        module.scale = 1.0 + step // 2
        options["power"] = 2 + step // 2
        ignored.data.fill_(step)

    check_steps(module, change)
    check_steps(lambda o, t: (o - t).abs().pow(options["power"]).mean(), change)
    check_steps(lambda o, t: F.mse_loss(o, t) * (1 + int(ignored)), change)


def test_tensors_and_arrays_may_change_between_steps_without_a_sign() -> None:
    factor, array, capped = torch.ones(3, dtype=torch.double), np.ones(3), {"most": 100}

    def change(step: int) -> None:
        factor.data.fill_(1 + step)
        array.fill(1 + step)

    check_steps(lambda o, t: F.mse_loss(o * factor, t) + o.abs().mean(), change)
    check_steps(lambda o, t: F.mse_loss(o, t) * float(array[0]) + o.abs().mean(), change)
    loss = StepLoss(lambda o, t: (o - t).square().sum() / min(len(o), capped["most"]))
    by_parts.by_parts(loss, *numbers(), 3)
    capped["most"] = 4  # more than a micro-batch has
    with pytest.raises(LossError, match="number of samples"):
        by_parts.by_parts(loss, *numbers(), 3)


def test_a_loss_of_torch_may_change_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.CrossEntropyLoss(weight=torch.ones(CLASSES).double())

    def change(step: int) -> None:
        module.ignore_index = step
        module.get_buffer("weight").data[step - 1] = 2.0 + step
        if step == 1:
            module.register_forward_hook(lambda *given: given[-1] * 2)
        if step == 2:
            monkeypatch.setattr(F, "cross_entropy", lambda o, t, **_: o.gather(1, t[:, None]).mean())
        if step == 3:
            module.forward = lambda o, t: o.square().mean()  # type: ignore[method-assign]

    check_steps(module, change, classes)


def test_gradients_of_a_part_may_stop_between_steps() -> None:
    stopped = {"after": False}

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        with torch.set_grad_enabled(not stopped["after"]):
            count = (o * (t > 0)).sum()
        return F.mse_loss(o, t) + count

    check_steps(loss_fn, lambda step: stopped.update(after=step > 1))


def test_a_function_in_the_place_of_torchs_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = F.mse_loss
    monkeypatch.setattr(F, "mse_loss", lambda o, t, **_: (o - t).square().sum() / 7)
    by_parts.check(nn.MSELoss(), *numbers(), 3)
    monkeypatch.setattr(F, "mse_loss", functools.partial(torchs, reduction="sum"))
    with pytest.raises(LossError, match="cannot be split"):
        by_parts.by_parts(nn.MSELoss(), *numbers(), 3)


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


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, t: (o - t).square().sum() / max(len(o), 4),
        lambda o, t: (o - t).square().sum() / min(len(o), 4),
        lambda o, t: F.mse_loss(o, t) if len(o) < 4 else F.l1_loss(o, t),
        lambda o, t: [F.mse_loss(o, t), F.l1_loss(o, t)][len(o) > 4],
        lambda o, t: F.mse_loss(o[: len(o) // 2], t[: len(o) // 2]),
        lambda o, t: F.mse_loss(o.chunk(2)[0], t.chunk(2)[0]),
        lambda o, t: (o - t).square().sum() / (t > 0).sum().item(),
    ],
)
def test_numbers_that_differ_for_the_mini_batch_are_refused(loss_fn: Loss, micro_batches: int) -> None:
    with pytest.raises(LossError, match=r"number of samples|some samples|some of them|read values last"):
        by_parts.by_parts(loss_fn, *numbers(), micro_batches)


def test_numbers_for_a_log_may_be_read_after_the_loss_is_computed() -> None:
    right: list[float] = []

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        loss = F.mse_loss(o, t)
        right.append((o > t).sum().item() / len(o))
        return loss

    by_parts.check(loss_fn, *numbers(), 3)
    assert right


class Smoothed(nn.Module):
    """Keeps a running mean of its loss for a log, and reads the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros((), dtype=torch.double)
        self.calls = 0

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        loss = (o - t).square().sum() / len(o)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


def test_a_loss_module_stays_as_its_calls_on_micro_batches_leave_it() -> None:
    module = Smoothed()
    by_parts.by_parts(module, *numbers(), 3)
    assert module.calls == 3
    assert module.mean.device.type == "cpu"


def test_a_count_that_is_a_tensor_is_divided_in_double():
    """Counts on an accelerator are integers there, and their total a number if the targets are on the CPU."""
    term = Term(torch.tensor(1.0), divisor=torch.tensor(3), divided=True)
    assert float(term.weight(7.0)) == 3 / 7
