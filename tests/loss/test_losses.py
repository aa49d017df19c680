"""Losses on micro-batches are those of the mini-batch: torch's, and a user's own if they add up over samples."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipepart.loss import LossError, value_of
from pipepart.loss.torch_losses import count_classes, count_classes_of_all
from tests.loss import by_parts
from tests.loss.exact_losses import CLASSES, CRITERIA, EXACT, Batch, Loss, numbers, tokens
from tests.loss.refused_losses import REFUSED, Averaging, Counting, Ema, coefficient_written
from tests.support.plain import copied

pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")


def cases(table: dict[Batch, list[Loss]]) -> list[Any]:
    """Every loss with its batch, under the line of its code."""
    found = []
    for batch, losses in table.items():
        for number, loss in enumerate(losses):
            code: Any = getattr(loss, "__code__", None)
            line = f"line {code.co_firstlineno}" if code else type(loss).__name__
            found.append(pytest.param(loss, batch, id=f"{batch.__name__}-{number}-{line}"))
    return found


@pytest.mark.parametrize("micro_batches", [2, 3, 4, 6])
@pytest.mark.parametrize(("loss_fn", "batch"), cases(EXACT))
def test_what_adds_up_is_exact(loss_fn: Loss, batch: Batch, micro_batches: int) -> None:
    by_parts.check(loss_fn, *batch(), micro_batches)


@pytest.mark.parametrize("micro_batches", [2, 3, 4, 6])
@pytest.mark.parametrize(("loss_fn", "batch"), cases(REFUSED))
def test_what_does_not_add_up_is_refused_with_the_choices(
    loss_fn: Loss, batch: Batch, micro_batches: int
) -> None:
    x, y = batch()
    for first in (False, True):
        given = copied(y)
        with pytest.raises(LossError) as caught:
            by_parts.by_parts(loss_fn, x, given, micro_batches, all_forwards_first=first)
        assert 'reduction="batch"' in str(caught.value)


@pytest.mark.parametrize(("loss_fn", "batch"), cases(REFUSED))
def test_one_micro_batch_is_exact_whatever_the_loss(loss_fn: Loss, batch: Batch) -> None:
    if isinstance(loss_fn, Counting | Averaging | Ema) or loss_fn is coefficient_written:
        pytest.skip("its value depends on earlier calls, or it has no gradient")
    output, target = batch()
    found = []
    for compute in (partial(by_parts.by_parts, micro_batches=1), by_parts.whole):
        torch.manual_seed(1)
        np.random.seed(1)
        found.append(compute(loss_fn, output, target)[0])
    torch.testing.assert_close(*found, equal_nan=True)


def test_a_constant_with_an_entry_for_each_sample_is_refused() -> None:
    weights = torch.ones(2, 1).double()
    with pytest.raises(LossError, match="pairs samples with entries of a constant"):
        by_parts.by_parts(lambda o, t: ((o - t) * weights).mean(), *numbers(), 3)


@pytest.mark.parametrize("empty", [slice(0, 2), slice(2, 6), slice(0, 6)])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("by_hand", [False, True])
def test_micro_batches_in_which_nothing_counts(by_hand: bool, factor: int, empty: slice) -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        if not by_hand:
            return F.cross_entropy(o.mT, t) * factor
        total = F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum")
        return total / (t != -100).sum().clamp(min=1) * factor

    x, y = tokens()
    y[empty] = -100
    by_parts.check(loss, x, y, 3)


def test_a_loss_is_called_once_a_micro_batch_and_may_read_values_when_it_is_computed() -> None:
    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        loss = F.mse_loss(o, t)
        calls.append(loss.item())
        return loss

    def and_counts(o: Tensor, t: Tensor) -> Tensor:
        loss = loss_fn(o, t)
        calls.append((o > t).sum().item() / len(o))
        return loss

    calls: list[float] = []
    output, target = numbers()
    by_parts.by_parts(loss_fn, output, target, 3)
    parts = zip(output.split(2), target.split(2), strict=True)
    assert calls == [F.mse_loss(a, b).item() for a, b in parts]
    by_parts.check(and_counts, output, target, 3)


@pytest.mark.parametrize("sizes", [[3, 2], [1, 0, 4], [0, 5, 0]])
def test_targets_of_all_micro_batches_are_counted_as_those_of_each(sizes: list[int]) -> None:
    targets = [torch.randint(3, (size, 2)) for size in sizes]
    assert count_classes_of_all(targets, 1) == [count_classes(target, None, 1) for target in targets]


def test_a_pair_is_the_mean_of_its_sums() -> None:
    total, count = torch.tensor(6.0), torch.tensor(3)
    assert value_of((total, count)) == 2


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("micro_batches", [1, 3, 4])
@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in a function"])
@pytest.mark.parametrize(("loss_fn", "batch"), cases(CRITERIA))
def test_a_loss_of_torch(loss_fn: Loss, batch: Batch, wrapped: bool, micro_batches: int) -> None:
    by_parts.check((lambda x, y: loss_fn(x, y)) if wrapped else loss_fn, *batch(), micro_batches)


@pytest.mark.parametrize("steps", [6, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4])
def test_temporal_classification_has_samples_along_dimension_1(
    micro_batches: int, reduction: str, steps: int
) -> None:
    """Also if there are as many steps as samples."""

    def loss_fn(output: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.ctc_loss(output, *target, reduction=reduction)

    output = torch.randn(steps, 6, CLASSES).double().log_softmax(dim=2)
    target = torch.randint(1, CLASSES, (6, 3)), torch.full((6,), steps), torch.randint(1, 4, (6,))
    by_parts.check(loss_fn, output, target, micro_batches, dimension=1)
