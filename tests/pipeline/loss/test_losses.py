"""What a loss may be, and how the losses of the micro-batches make up that of the mini-batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipepart.loss import LossError
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls

CLASSES = 5


def classifier() -> nn.Sequential:
    return plain.in_double([nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)])


def check_whole_step(model: nn.Module, x: Any, y: Any, loss_fn: Any, micro_batches: int = 3) -> None:
    """Loss and gradients of ``step`` against those of the plain model on the whole mini-batch."""
    reference = plain.twin(model)
    with cut_by_hand(model, [1], loss_fn=loss_fn, micro_batches=micro_batches) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(reference, x, y, loss_fn), what="loss")
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


class SmoothMean(nn.Module):
    """A loss of the user's own that states nothing of its reduction."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.softplus(output).sum(dim=1).mean() + 0 * target.sum()


CLASS_WEIGHTS = torch.tensor([0.1, 2.0, 1.0, 0.0, 3.0], dtype=torch.double)
CLASS_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "function": functional.cross_entropy,
    "partial of partial": partial(partial(functional.cross_entropy, reduction="mean"), reduction="sum"),
    "lambda": lambda output, target: functional.cross_entropy(output, target),
    "module": SmoothMean(),
    "class weights, smoothed": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS + 1, label_smoothing=0.1),
    "class weights, partial": partial(functional.cross_entropy, weight=CLASS_WEIGHTS),
}


@pytest.mark.parametrize("name", CLASS_LOSSES)
@pytest.mark.parametrize("samples", [2, 11])
def test_losses_over_classes(name, samples):
    x, y = torch.randn(samples, 4).double(), torch.randint(CLASSES, (samples,))
    check_whole_step(classifier(), x, y, CLASS_LOSSES[name])


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(ignore_index=2), partial(functional.cross_entropy, ignore_index=2)]
)
def test_ignored_targets_count_for_nothing_however_they_fall(loss_fn):
    """Counts differ from micro-batch to micro-batch, and the second of them is ignored as a whole."""
    y = torch.tensor([0, 1, 2, 2, 2, 2, 4, 3, 1])
    check_whole_step(classifier(), torch.randn(9, 4).double(), y, loss_fn)


@pytest.mark.parametrize(
    "loss_fn", [lambda output: output.pow(2).mean(), lambda output: output.pow(2).sum(dim=1).sum()]
)
def test_a_loss_without_target(loss_fn):
    model = classifier()
    reference = plain.twin(model)
    x = torch.randn(7, 4).double()
    with cut_by_hand(model, [1], loss_fn=loss_fn) as pipe:
        loss = pipe.step(x)
    expected = loss_fn(reference(x))
    expected.backward()
    plain.assert_near(loss, expected.detach())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


class OwnLoss(nn.Module):
    """Computes the loss of the model: a mean or a sum of squares."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Tensor) -> Tensor:
        return getattr(x.pow(2), self.reduction)()


def with_own_loss(reduction: str) -> nn.Sequential:
    return plain.in_double([nn.Linear(4, 4), nn.Linear(4, 3), OwnLoss(reduction)])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_a_model_that_computes_its_own_loss_says_what_it_is(reduction, recompute):
    model = with_own_loss(reduction)
    reference = plain.twin(model)
    x = torch.randn(7, 4).double()
    with cut_by_hand(model, [1], reduction=reduction, recompute=recompute) as pipe:
        loss = pipe.step(x)
    expected = reference(x)
    expected.backward()
    plain.assert_near(loss, expected.detach())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_model_that_computes_its_own_loss_and_does_not_say_is_refused():
    model = with_own_loss("mean")
    with cut_by_hand(model, [1]) as pipe, pytest.raises(LossError, match=r"reduction=\"mean\""):
        pipe.step(torch.randn(7, 4).double())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_targets_may_be_nests():
    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return ((output - target["mean"]) / target["scale"]).pow(2).mean()

    target = {"mean": torch.randn(7, CLASSES).double(), "scale": 1 + torch.rand(7, CLASSES).double()}
    check_whole_step(classifier(), torch.randn(7, 4).double(), target, loss_fn)


def test_a_loss_that_does_not_add_up_is_refused_before_any_gradient_is_there():
    def worst(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().max() ** 2

    model = classifier()
    x, y = torch.randn(9, 4).double(), torch.zeros(9, CLASSES).double()
    with cut_by_hand(model, [1], loss_fn=worst) as pipe:
        with pytest.raises(
            LossError, match=r"worst \(test_losses.py:\d+\) cannot be split.*max at loss/test_losses.py:\d+"
        ):
            pipe.step(x, target=y)
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(LossError, match=r'reduction="batch"'):
            pipe.step(x, target=y)


def test_a_loss_that_is_not_a_number_comes_back_as_such():
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).mean()

    with cut_by_hand(classifier(), [1], loss_fn=loss_fn) as pipe:
        loss = pipe.step(torch.full((6, 4), torch.nan).double(), target=torch.zeros(6, CLASSES).double())
    assert loss.isnan()


def test_an_output_whose_first_dimension_is_samples_times_tokens():
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target.flatten())

    model = plain.in_double([nn.Embedding(11, 8), nn.Linear(8, 11), Calls(lambda x: x.flatten(0, 1))])
    tokens = torch.randint(11, (7, 5))
    check_whole_step(model, tokens, tokens.roll(1, dims=1), loss_fn)


def test_an_output_with_the_losses_of_its_samples_beside_it():
    class WithPenalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            output = self.linear(x)
            return output, output.pow(2).mean(dim=1)

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return functional.cross_entropy(output[0], target) + 0.1 * output[1].mean()

    model = plain.in_double([nn.Linear(4, 6), WithPenalty()])
    check_whole_step(model, torch.randn(7, 4).double(), torch.randint(CLASSES, (7,)), loss_fn)


def test_a_loss_may_have_parameters():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.double))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.scale * output - target).pow(2).mean()

    loss_fn = Scaled()
    reference = plain.twin(loss_fn)
    model = classifier()
    plain_model = plain.twin(model)
    x, y = torch.randn(7, 4).double(), torch.randn(7, CLASSES).double()
    with cut_by_hand(model, [1], loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
    plain.whole_step(plain_model, x, y, reference)
    plain.assert_close(plain.gradients(loss_fn), plain.gradients(reference))
    plain.assert_close(plain.gradients(model), plain.gradients(plain_model))


def test_all_targets_ignored_gives_what_torch_gives():
    model = classifier()
    reference = plain.twin(model)
    x, y = torch.randn(4, 4).double(), torch.full((4,), -100)
    with cut_by_hand(model, [1], loss_fn=nn.CrossEntropyLoss(), micro_batches=2) as pipe:
        loss = pipe.step(x, target=y)
    expected = plain.whole_step(reference, x, y, nn.CrossEntropyLoss())
    assert loss.isnan()
    assert expected.isnan()
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
