"""Losses of several means, and of means over what is no sample: exact, or refused with the code to write."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipepart.loss import Reduction, StepLoss
from tests.loss import by_parts

CLASSES = 4


def tokens(samples: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Logits and targets of sequences, the first of which are mostly padding."""
    y = torch.randint(CLASSES, (samples, length))
    for index in range(samples // 2):
        y[index, 1:] = -100
    return torch.randn(samples, length, CLASSES).double(), y


def penalised(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten()) + 0.1 * output.pow(2).mean()


def shifted(output: Tensor, target: Tensor) -> Tensor:
    logits, labels = output[:, :-1].float().double(), target[:, 1:].to(output.device)
    loss = functional.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1))
    return loss + 1e-2 * torch.logsumexp(logits, dim=-1).pow(2)[labels != -100].mean()


def masked(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != -100).double()
    return (output.pow(2).sum(dim=2) * mask).sum() / mask.sum().clamp(min=1)


def masked_by_number(output: Tensor, target: Tensor) -> Tensor:
    kept = target != -100
    return output.logsumexp(dim=2)[kept].sum() / int(kept.sum())


def normalised_weights(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != -100).double()
    return (output.pow(2).sum(dim=2) * (mask / mask.sum())).sum()


def balanced_classes(output: Tensor, target: Tensor) -> Tensor:
    weight = 1 / target.clamp(min=0).flatten().bincount(minlength=CLASSES).clamp(min=1).double()
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), weight=weight)


def of_elements_not_reduced(output: Tensor, target: Tensor) -> Tensor:
    losses = functional.cross_entropy(output.mT, target, reduction="none")
    return losses.sum() / (target != -100).sum() - output.abs().mean() / 3


def gathered(output: Tensor, target: Tensor) -> Tensor:
    total = torch.zeros((), dtype=output.dtype)
    for weight, loss in (
        (1.0, masked(output, target)),
        (0.5, output.abs().mean()),
        (2.0, output.sum() * 1e-3),
    ):
        total += weight * loss
    return torch.stack([total, penalised(output, target)]).sum()


def with_a_constant(output: Tensor, target: Tensor) -> Tensor:
    return penalised(output, target) + 3.0


def with_a_note(output: Tensor, target: Tensor) -> Tensor:
    loss = penalised(output, target)
    NOTES.append(loss.item())
    return loss


class Penalised(nn.Module):
    """Adds the size of its own weights to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return penalised(output, target) + 0.1 * self.weight.pow(2).sum() - self.weight[0] * output.sum()


class OnDevice(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        target = target.to(output.device)
        zero = output.new_zeros(())
        weight = torch.ones(CLASSES, device=output.device, dtype=output.dtype)
        return zero + functional.cross_entropy(output.mT, target, weight=weight) + masked(output, target)


NOTES: list[float] = []
MIXTURES: list[Any] = [
    penalised,
    shifted,
    masked,
    masked_by_number,
    normalised_weights,
    balanced_classes,
    of_elements_not_reduced,
    gathered,
    with_a_constant,
    with_a_note,
    Penalised(),
    OnDevice(),
]


@pytest.mark.parametrize("loss_fn", MIXTURES, ids=lambda f: getattr(f, "__name__", type(f).__name__))
@pytest.mark.parametrize(
    ("samples", "micro_batches"),
    [
        (3, 5),
        (7, 3),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(8, 2, marks=pytest.mark.slow),
        pytest.param(9, 4, marks=pytest.mark.slow),
    ],
)
def test_each_mean_has_a_weight_of_its_own(loss_fn, samples, micro_batches):
    by_parts.check(loss_fn, *tokens(samples), micro_batches)


@pytest.mark.parametrize("loss_fn", [penalised, masked, gathered, of_elements_not_reduced])
def test_a_micro_batch_of_nothing_that_counts(loss_fn):
    output, target = tokens(6)
    target[:3] = -100
    by_parts.check(loss_fn, output, target, 2)
    by_parts.check(loss_fn, output, target, 6)


def test_all_that_the_model_says_itself_and_more():
    def loss_fn(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return penalised(outputs[0], target) + 0.1 * outputs[1]

    output, target = tokens(5)
    loss = StepLoss(loss_fn).parts(target, [target[:3], target[3:]], [3, 2])
    own = torch.tensor([4.0, 9.0]).double()
    taken = [
        loss.of(index, (part, own[index]), None if target is None else target_part)
        for index, (part, target_part) in enumerate([(output[:3], target[:3]), (output[3:], target[3:])])
    ]
    total = sum(float(value) * (weight or 0.0) for value, weight in taken)
    expected = float(
        loss_fn((output, torch.tensor(6.0).double()), target)
    )  # 6 is the mean over samples of 4 and 9
    assert total == pytest.approx(expected, rel=1e-12)


def root(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output[..., 0], target.double()).sqrt()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    flat = output.flatten(1)
    return functional.cross_entropy(flat @ flat.T, torch.arange(len(flat)))


def product(output: Tensor, target: Tensor) -> Tensor:
    return output.pow(2).mean() * output.abs().mean()


def share_of_largest(output: Tensor, target: Tensor) -> Tensor:
    return output.pow(2).sum() / output.abs().max()


@pytest.mark.parametrize("loss_fn", [root, contrastive, product, share_of_largest])
def test_what_does_not_add_up_is_refused_with_the_code_to_write(loss_fn):
    output, target = tokens(8)
    with pytest.raises(ValueError, match=r"neither a mean nor a sum over samples") as caught:
        by_parts.check(loss_fn, output, target, 2)
    assert "return (losses * kept).sum(), kept.sum()" in str(caught.value)


def per_sample(output: Tensor, target: Tensor) -> Tensor:
    return output.pow(2).sum() / len(output)


def in_numpy(output: Tensor, target: Tensor) -> Tensor:
    assert output.detach().numpy().shape[0] == len(target)
    return output.abs().mean()


def mean_of_means(output: Tensor, target: Tensor) -> Tensor:
    return output.pow(2).mean(dim=0).sum()


def one_by_one(output: Tensor, target: Tensor) -> Tensor:
    return torch.stack(
        [(row - label).pow(2).mean() for row, label in zip(output, target, strict=True)]
    ).mean()


@pytest.mark.parametrize("loss_fn", [per_sample, in_numpy, mean_of_means, one_by_one])
def test_a_mean_over_samples_in_other_words(loss_fn):
    output = torch.randn(7, 3).double()
    by_parts.check(loss_fn, output, torch.randn(7, 3).double(), 3)


def hidden_count(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples, and one over targets that count, which the first micro-batch does not tell apart."""
    return functional.cross_entropy(output.mT, target) + output.pow(2).sum() / output.shape[0]


def hidden_mask(output: Tensor, target: Tensor) -> Tensor:
    kept = (target != -100).double()
    return torch.dot(output[..., 0].flatten(), kept.flatten()) / kept.sum()


@pytest.mark.parametrize("loss_fn", [hidden_count, hidden_mask])
def test_a_count_that_one_micro_batch_does_not_show_is_not_taken_for_one_of_samples(loss_fn):
    output, target = tokens(8)
    target[:2, 1:] = torch.randint(CLASSES, (2, 4))
    target[4:, 2:] = -100
    with pytest.raises(ValueError, match=r"it counts .* of what it counts of the mini-batch"):
        by_parts.check(loss_fn, output, target, 4)


def test_a_user_may_vouch_for_a_mean_over_samples():
    output, target = tokens(4)
    loss = StepLoss(hidden_mask, Reduction.MEAN)
    found, _ = by_parts.by_parts(loss, output, target, 2)
    means = [float(hidden_mask(output[part], target[part])) for part in (slice(2), slice(2, 4))]
    assert float(found) == pytest.approx(sum(means) / 2, rel=1e-12)


class Counting(nn.Module):
    """Keeps a running centre, as a loss of self-distillation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.double))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - self.centre).pow(2).mean()
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(dim=0)
        return loss


def test_what_a_loss_keeps_of_outputs_has_values():
    loss = StepLoss(module := Counting())
    by_parts.by_parts(loss, torch.randn(6, 3).double(), torch.zeros(6, 3), 2)
    assert not module.centre.is_meta
    assert module.centre.isfinite().all()


def test_a_loss_that_writes_into_its_target_is_not_given_the_mini_batch_to_write_into():
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(target.shape[0])
        mask = target != -100
        target[~mask] = 0
        return functional.cross_entropy(output.mT, target) * mask.double().mean()

    seen: list[int] = []
    output, target = tokens(4)
    before = target[2:].clone()
    loss = StepLoss(loss_fn).parts(target, [target[:2], target[2:]], [2, 2])
    loss._survey(0, output[:2])
    assert target.shape[0] in seen
    assert target[:2].eq(-100).any()
    assert target[2:].equal(before)


def test_a_number_that_is_read_for_a_note_stays_that_of_the_micro_batch():
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        notes.append(float(target.min()))
        return functional.mse_loss(output, target)

    notes: list[float] = []
    target = torch.arange(6.0).double()
    parts = list(target.split(2))
    loss = StepLoss(loss_fn).parts(target, parts, [2, 2, 2])
    for index, part in enumerate(parts):
        loss.of(index, part + 1, part)
        assert notes[-1] == 2 * index


def nothing_where_nothing_counts(output: Tensor, target: Tensor) -> Tensor:
    kept = target != -100
    if not kept.any():
        return output.sum() * 0
    return output.pow(2).sum(dim=2)[kept].mean()


def test_a_branch_is_that_of_the_mini_batch():
    output, target = tokens(6)
    target[:3] = -100
    by_parts.check(nothing_where_nothing_counts, output, target, 2)
