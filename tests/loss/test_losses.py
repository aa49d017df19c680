"""Losses on micro-batches are those of the mini-batch: torch's, and a user's own if they add up over samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipepart.loss import LossError, value_of
from tests.loss import by_parts
from tests.loss.exact_losses import EXACT, Batch, Loss, numbers, tokens
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


def test_a_pair_is_the_mean_of_its_sums() -> None:
    total, count = torch.tensor(6.0), torch.tensor(3)
    assert value_of((total, count)) == 2


CLASSES = 4
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 0.0], dtype=torch.double)


def logits(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, CLASSES).double(), torch.randint(CLASSES, (samples,))


def some_ignored(samples: int) -> tuple[Tensor, Tensor]:
    x, y = logits(samples)
    return x, torch.where(torch.rand(samples) < 0.5, -100, y)


def all_ignored(samples: int) -> tuple[Tensor, Tensor]:
    return logits(samples)[0], torch.full((samples,), -100)


def log_probabilities(samples: int) -> tuple[Tensor, Tensor]:
    x, y = some_ignored(samples)
    return x.log_softmax(dim=1), y


def pixels(samples: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(-1, CLASSES, (samples, 3, 2))
    return torch.randn(samples, CLASSES, 3, 2).double(), torch.where(y < 0, -100, y)


def class_probabilities(samples: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, samples, CLASSES).double().softmax(dim=2))  # type: ignore[return-value]


def distributions(samples: int) -> tuple[Tensor, Tensor]:
    x, y = class_probabilities(samples)
    return x.log(), y


def log_distributions(samples: int) -> tuple[Tensor, Tensor]:
    x, y = distributions(samples)
    return x, y.log()


def pairs(samples: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, samples, 3).double())  # type: ignore[return-value]


def signs(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3).double(), torch.randint(2, (samples, 3)).double() * 2 - 1


def yes_or_no(samples: int) -> tuple[Tensor, Tensor]:
    return torch.rand(samples, 3).double(), torch.randint(2, (samples, 3)).double()


def labels(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, CLASSES).double(), torch.randint(-1, CLASSES, (samples, CLASSES))


ragged = pytest.mark.parametrize(
    ("samples", "micro_batches"),
    [
        (3, 5),
        (7, 3),
        (9, 1),
        pytest.param(8, 2, marks=pytest.mark.slow),
        pytest.param(9, 4, marks=pytest.mark.slow),
    ],
)

Sized = Callable[[int], tuple[Tensor, Tensor]]
LOSSES: dict[str, tuple[nn.Module, Sized]] = {
    "cross entropy": (nn.CrossEntropyLoss(), some_ignored),
    "of all ignored": (nn.CrossEntropyLoss(), all_ignored),
    "ignoring a class": (nn.CrossEntropyLoss(ignore_index=2), logits),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHTS), some_ignored),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), some_ignored),
    "smoothed, weights": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), some_ignored),
    "probabilities": (nn.CrossEntropyLoss(), class_probabilities),
    "probabilities, weights": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), class_probabilities),
    "pixels": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), pixels),
    "summed": (nn.CrossEntropyLoss(reduction="sum"), some_ignored),
    "likelihood": (nn.NLLLoss(weight=WEIGHTS), log_probabilities),
    "likelihood of pixels": (nn.NLLLoss(), pixels),
    "BCE": (nn.BCELoss(), yes_or_no),
    "BCE, weights": (nn.BCELoss(weight=torch.tensor([1.0, 0.0, 3.0], dtype=torch.double)), yes_or_no),
    "BCE of logits": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2, 3]).double()), yes_or_no),
    "MSE": (nn.MSELoss(), pairs),
    "MSE, summed": (nn.MSELoss(reduction="sum"), pairs),
    "L1": (nn.L1Loss(), pairs),
    "smooth L1": (nn.SmoothL1Loss(beta=0.5), pairs),
    "Huber": (nn.HuberLoss(), pairs),
    "Poisson": (nn.PoissonNLLLoss(), pairs),
    "KL divergence": (nn.KLDivLoss(), distributions),
    "KL divergence by samples": (nn.KLDivLoss(reduction="batchmean", log_target=True), log_distributions),
    "hinge embedding": (nn.HingeEmbeddingLoss(), signs),
    "soft margin": (nn.SoftMarginLoss(), signs),
    "multi margin": (nn.MultiMarginLoss(weight=WEIGHTS, p=2), logits),
    "multi-label margin": (nn.MultiLabelMarginLoss(), labels),
    "multi-label soft margin": (nn.MultiLabelSoftMarginLoss(), yes_or_no),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in a function"])
@ragged
def test_a_loss_of_torch(name, wrapped, samples, micro_batches):
    loss_fn, batch = LOSSES[name]
    output, target = batch(samples)
    by_parts.check((lambda x, y: loss_fn(x, y)) if wrapped else loss_fn, output, target, micro_batches)


def of_several(function: Callable[..., Tensor], given: int, **options: Any) -> Callable[..., Tensor]:
    """A loss of several outputs, and of a target where it takes one."""
    if given:
        return lambda outputs, target: function(*outputs, target, **options)
    return lambda outputs: function(*outputs, **options)


def embeddings(samples: int, outputs: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(outputs, samples, 3).double())


def one_sign(samples: int) -> Tensor:
    return torch.randint(2, (samples,)).double() * 2 - 1


SEVERAL: dict[str, tuple[Callable[..., Tensor], int, Callable[[int], Tensor] | None]] = {
    "cosine embedding": (partial(F.cosine_embedding_loss, margin=0.2), 2, one_sign),
    "margin ranking": (lambda a, b, y: F.margin_ranking_loss(a[:, 0], b[:, 0], y), 2, one_sign),
    "triplet margin": (F.triplet_margin_loss, 3, None),
    "triplet margin of own distance": (nn.TripletMarginWithDistanceLoss(margin=0.5), 3, None),
    "Gaussian": (lambda m, v, y: nn.GaussianNLLLoss()(m, y[:, None], v.exp()), 2, one_sign),
}


@pytest.mark.parametrize("name", SEVERAL)
@ragged
def test_a_loss_of_several_outputs(name, samples, micro_batches):
    function, outputs, targets = SEVERAL[name]
    target = targets(samples) if targets else None
    loss_fn = of_several(function, given=target is not None)
    by_parts.check(loss_fn, embeddings(samples, outputs), target, micro_batches)


@pytest.mark.parametrize("steps", [7, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@ragged
def test_temporal_classification_has_samples_along_dimension_1(reduction, steps, samples, micro_batches):
    def loss_fn(output: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.ctc_loss(output, *target, reduction=reduction)

    output = torch.randn(steps, samples, CLASSES).double().log_softmax(dim=2)
    lengths = torch.randint(1, 4, (samples,))
    target = torch.randint(1, CLASSES, (samples, 3)), torch.full((samples,), steps), lengths
    by_parts.check(loss_fn, output, target, micro_batches, dimension=1)
