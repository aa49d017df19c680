"""A loss is analysed once for all its steps, and what it reads may change between them."""

import functools
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
from tests.loss.batches import CLASSES, classes, numbers

Loss = Callable[[Tensor, Tensor], Any]


def check_step(loss: StepLoss, loss_fn: Loss, x: Any, y: Any, parts_of_y: Any = None) -> None:
    """A step with this loss has the numbers of the whole mini-batch."""
    theirs, leaves = by_parts.whole(loss_fn, x, y)
    ours, mine = by_parts.by_parts(loss, x, y if parts_of_y is None else parts_of_y, 3)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(mine, leaves, rtol=1e-11, atol=1e-13)


def check_steps(loss_fn: Loss, change: Callable[[int], object], batch: Callable[[], Any] = numbers) -> None:
    """Take several steps of one loss, and check each."""
    loss = StepLoss(loss_fn)
    for step in range(4):
        change(step)
        check_step(loss, loss_fn, *batch())


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


def test_calls_that_are_the_same_are_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[int] = []
    begin = Analysis.__init__
    monkeypatch.setattr(Analysis, "__init__", lambda *given: (analysed.append(1), begin(*given))[1])
    losses: list[Loss] = [
        F.mse_loss,
        lambda o, t: (o - t).square().mean() + 0.1 * o.abs().mean(),
        lambda o, t: (o - t).square().sum() / o.shape[0],
    ]
    for loss_fn in losses:
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


def test_what_a_loss_reads_may_change_between_steps() -> None:
    """Numbers, and tensors and arrays without a sign; gradients of a part may stop."""
    module, options, ignored = Scaled(), {"power": 2, "most": 100}, torch.zeros(1, dtype=torch.long)
    factor, array = torch.ones(3, dtype=torch.double), np.ones(3)

    def change(step: int) -> None:
        module.scale = 1.0 + step // 2
        options["power"] = 2 + step // 2
        ignored.data.fill_(step)
        factor.data.fill_(1 + step)
        array.fill(1 + step)

    def stopping(o: Tensor, t: Tensor) -> Tensor:
        with torch.set_grad_enabled(options["power"] == 2):
            count = (o * (t > 0)).sum()
        return F.mse_loss(o, t) + count

    check_steps(module, change)
    check_steps(lambda o, t: (o - t).abs().pow(options["power"]).mean(), change)
    check_steps(lambda o, t: F.mse_loss(o, t) * (1 + int(ignored)), change)
    check_steps(lambda o, t: F.mse_loss(o * factor, t) + o.abs().mean(), change)
    check_steps(lambda o, t: F.mse_loss(o, t) * float(array[0]) + o.abs().mean(), change)
    check_steps(stopping, change)
    loss = StepLoss(lambda o, t: (o - t).square().sum() / min(len(o), options["most"]))
    by_parts.by_parts(loss, *numbers(), 3)
    options["most"] = 4  # more than a micro-batch has
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
        check_step(loss, loss_fn, x, (y, weights), (y, Whole(weights)))


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
