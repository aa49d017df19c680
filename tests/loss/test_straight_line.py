"""A function without branches that reads nothing but its arguments needs a tape for the first micro-batch only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import l1_loss

from pipepart.loss import LossError, StepLoss
from pipepart.loss.straight_line import code_of_straight_line
from pipepart.loss.tape import Tape
from tests.loss import by_parts
from tests.loss.batches import classes, numbers, tokens

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
        found, (gradient, *_) = by_parts.by_parts(loss, x, y, micro_batches)
        expected, (theirs, *_) = by_parts.whole(loss_fn, x, y)
        torch.testing.assert_close((found, gradient), (expected, theirs), rtol=1e-11, atol=1e-13)
    entered.clear()
    by_parts.by_parts(loss, x, y, micro_batches)
    assert not any(type(tape) is Tape for tape in entered)


def reduced(o: Tensor, t: Tensor) -> Tensor:
    return CHOSEN((o - t).square())


def test_another_function_of_torch_from_one_step_to_the_next_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, (x, y) = StepLoss(reduced), numbers()
    for function in (torch.mean, torch.sum, torch.mean):
        monkeypatch.setitem(globals(), "CHOSEN", function)
        found, (gradient,) = by_parts.by_parts(loss, x, y, 3)
        expected, (theirs,) = by_parts.whole(reduced, x, y)
        torch.testing.assert_close((found, gradient), (expected, theirs), rtol=1e-11, atol=1e-13)


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
