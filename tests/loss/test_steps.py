"""A loss is analysed once for all its steps, and what it reads may change between them."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import l1_loss

from pipepart.data.split import Whole
from pipepart.loss import LossError, Reduction, StepLoss
from pipepart.loss.analysis import Analysis
from pipepart.loss.straight_line import code_of_straight_line
from pipepart.loss.tape import Tape
from pipepart.loss.terms import Term
from tests.loss import by_parts
from tests.loss.exact_losses import CLASSES, classes, numbers, tokens

Loss = Callable[[Tensor, Tensor], Any]


def check_step(
    loss: StepLoss, loss_fn: Loss, x: Any, y: Any, micro_batches: int = 3, parts_of_y: Any = None
) -> None:
    """A step with this loss has the numbers of the whole mini-batch."""
    theirs, leaves = by_parts.whole(loss_fn, x, y)
    ours, mine = by_parts.by_parts(loss, x, y if parts_of_y is None else parts_of_y, micro_batches)
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


class Optional(nn.Module):
    """A loss with options, one of which the caller changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.within = nn.L1Loss()

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return self.within(o, t) * self.scale


def test_what_a_loss_reads_may_change_between_steps() -> None:
    """Numbers, and tensors and arrays without a sign; gradients of a part may stop."""
    module, options, ignored = Optional(), {"power": 2, "most": 100}, torch.zeros(1, dtype=torch.long)
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
        check_step(loss, loss_fn, x, (y, weights), parts_of_y=(y, Whole(weights)))


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


SCALE = 1.0
OPTIONS = {"scale": 1.0}
WEIGHTS = torch.ones(3, dtype=torch.double)
CHOSEN: Any = torch.mean


def smoothed(o: Tensor, t: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(o, t, label_smoothing=0.1) + 0.1 * o.logsumexp(-1).pow(2).mean()


def counted(o: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    kept = t != -100
    return (F.cross_entropy(o.mT, t, reduction="none") * kept).sum(), kept.sum().clamp(min=1)


def columns(o: Tensor, t: Tensor) -> Tensor:
    difference = (o - t)[:, 1:]
    return (difference * difference).sum() / (2 * len(o)) - l1_loss(-o, t) / 3


STRAIGHT: list[tuple[Callable[..., Any], Callable[[], Any]]] = [
    (lambda o, t: F.cross_entropy(o, t), classes),
    (lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), tokens),
    (lambda o, t: ((o - t) ** 2 * (t > 0)).sum() / (t > 0).sum(), numbers),
    *((smoothed, classes), (counted, tokens), (columns, numbers)),
]


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
@pytest.mark.parametrize("case", range(len(STRAIGHT)))
def test_a_straight_function_is_exact_and_is_recorded_once_for_each_size(
    case: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_fn, batch = STRAIGHT[case]
    entered: list[Tape] = []
    enter = Tape.__enter__
    monkeypatch.setattr(Tape, "__enter__", lambda tape: (entered.append(tape), enter(tape))[1])
    x, y = batch()
    by_parts.by_parts(loss_fn, x, y, micro_batches)
    recorded = sum(type(tape) is Tape for tape in entered)
    assert recorded == len({len(part) for part in x.tensor_split(micro_batches)})
    by_parts.check(loss_fn, x, y, micro_batches)
    loss = StepLoss(loss_fn)
    for _ in range(3):  # later steps know the pattern
        check_step(loss, loss_fn, x, y, micro_batches)
    entered.clear()
    by_parts.by_parts(loss, x, y, micro_batches)
    assert not any(type(tape) is Tape for tape in entered)


def reduced(o: Tensor, t: Tensor) -> Tensor:
    return CHOSEN((o - t).square())


def test_another_function_of_torch_from_one_step_to_the_next_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, (x, y) = StepLoss(reduced), numbers()
    for function in (torch.mean, torch.sum, torch.mean):
        monkeypatch.setitem(globals(), "CHOSEN", function)
        check_step(loss, reduced, x, y)


def test_weights_of_classes_may_count_for_no_sample_of_a_micro_batch() -> None:
    """The mean of that micro-batch is 0 / 0, at an output that the function computes."""
    x, y = classes()
    y = y.sort().values
    by_parts.check(lambda o, t: F.cross_entropy(o * 2, t, torch.arange(o.shape[1]).to(o.dtype)), x, y, 3)


def branches(o: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(o, t) if len(o) else o.sum()


def loops(o: Tensor, t: Tensor) -> Tensor:
    for _ in range(2):
        o = o + 1
    return F.mse_loss(o, t)


def writes(o: Tensor, t: Tensor) -> Tensor:
    global SCALE
    SCALE = SCALE + 1
    return F.mse_loss(o, t)


def catches(o: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        t = t * 1
    return F.mse_loss(o, t)


def defaults(o: Tensor, t: Tensor, weights: Tensor = WEIGHTS) -> Tensor:
    return F.mse_loss(o * weights, t)


def enclosing() -> Callable[..., Any]:
    scale = 2.0
    return lambda o, t: F.mse_loss(o, t) * scale


@pytest.mark.parametrize(
    "loss_fn",
    [
        *(branches, loops, writes, catches, defaults, enclosing(), F.mse_loss, torch.nn.MSELoss()),
        lambda o, t: F.mse_loss(o, t) * SCALE,
        lambda o, t: F.mse_loss(o, t) * OPTIONS["scale"],
        lambda o, t: F.mse_loss(o * WEIGHTS, t),
        lambda o, t: F.mse_loss(o, t) * o.scale_of_the_user,
        lambda o, t: smoothed(o, t),
        lambda o, t: [F.mse_loss(a, b) for a, b in zip(o, t, strict=True)],
        lambda o, t: F.mse_loss(o, t) and F.l1_loss(o, t),
        lambda o, t: abs(F.mse_loss(o, t)),
        lambda o, t: F.mse_loss(o, t) * torch.finfo(o.dtype).eps,
    ],
)
def test_a_function_whose_calls_may_change_is_not_straight(loss_fn: Callable[..., Any]) -> None:
    assert not code_of_straight_line(loss_fn)


def test_a_function_in_the_place_of_torchs_is_not_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o, t)

    assert code_of_straight_line(loss_fn)
    monkeypatch.setattr(F, "mse_loss", lambda o, t: (o - t).square().mean() * SCALE)
    assert not code_of_straight_line(loss_fn)


def test_a_number_of_a_global_that_changes_within_a_step_is_seen() -> None:
    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        OPTIONS["scale"] += 1
        return F.mse_loss(o, t) * OPTIONS["scale"]

    with pytest.raises(LossError, match="computes something else than for micro-batch 0"):
        by_parts.by_parts(loss_fn, *numbers(), 3)
