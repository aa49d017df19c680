"""Every loss of torch on micro-batches, compared with the same loss on the whole mini-batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.loss import by_parts

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


def numbers(samples: int) -> tuple[Tensor, Tensor]:
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

Batch = Callable[[int], tuple[Tensor, Tensor]]
LOSSES: dict[str, tuple[nn.Module, Batch]] = {
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
    "MSE": (nn.MSELoss(), numbers),
    "MSE, summed": (nn.MSELoss(reduction="sum"), numbers),
    "L1": (nn.L1Loss(), numbers),
    "smooth L1": (nn.SmoothL1Loss(beta=0.5), numbers),
    "Huber": (nn.HuberLoss(), numbers),
    "Poisson": (nn.PoissonNLLLoss(), numbers),
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
    "cosine embedding": (partial(functional.cosine_embedding_loss, margin=0.2), 2, one_sign),
    "margin ranking": (lambda a, b, y: functional.margin_ranking_loss(a[:, 0], b[:, 0], y), 2, one_sign),
    "triplet margin": (functional.triplet_margin_loss, 3, None),
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
        return functional.ctc_loss(output, *target, reduction=reduction)

    output = torch.randn(steps, samples, CLASSES).double().log_softmax(dim=2)
    lengths = torch.randint(1, 4, (samples,))
    target = torch.randint(1, CLASSES, (samples, 3)), torch.full((samples,), steps), lengths
    by_parts.check(loss_fn, output, target, micro_batches, dimension=1)
