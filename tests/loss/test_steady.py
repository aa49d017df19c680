"""From step to step a loss is followed by what was found out about it; what changes in between is seen."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipepart.loss import StepLoss
from tests.loss import by_parts
from tests.loss.test_mixtures import CLASSES, MIXTURES, masked, penalised
from tests.support import plain

STEPS = 7


def padded(samples: int, step: int) -> tuple[Tensor, Tensor]:
    """Sequences of which more are padding in some steps than in others, in other places."""
    target = torch.randint(CLASSES, (samples, 5))
    for index in range(samples):
        target[index, 1 + (index + step) % 5 :] = -100
    return torch.randn(samples, 5, CLASSES).double(), target


def check_steps(loss_fn: Any, before: Any = lambda step: None, samples: int = 8, parts: int = 4) -> None:
    loss = StepLoss(loss_fn)
    for step in range(STEPS):
        before(step)
        output, target = padded(samples, step)
        ours, our_gradients = by_parts.by_parts(loss, output, target, parts)
        theirs, gradients = by_parts.whole(loss_fn, output, target)
        plain.assert_near(ours, theirs, what=f"loss of step {step}")
        plain.assert_near(our_gradients[0], gradients[0], what=f"gradient of step {step}")


def weighted(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.tensor([0.5, 0.0, 2.0, 1.0]).double()
    return functional.cross_entropy(output.mT, target, weight=weight, ignore_index=-100)


def of_kept_only(output: Tensor, target: Tensor) -> Tensor:
    kept = target != -100
    return functional.cross_entropy(output[kept], target[kept]) + output[kept].pow(2).mean()


def written(output: Tensor, target: Tensor) -> Tensor:
    labels = target.clone()
    labels[:, 0] = -100
    return functional.cross_entropy(output.mT, labels)


@pytest.mark.parametrize(
    "loss_fn",
    [*MIXTURES, weighted, of_kept_only, written],
    ids=lambda f: getattr(f, "__name__", type(f).__name__),
)
def test_every_step_is_exact_whatever_its_targets(loss_fn):
    check_steps(loss_fn)


def test_parts_of_several_sizes():
    check_steps(penalised, samples=7, parts=3)


class Changing:
    """A loss whose numbers, calls or counts change between steps."""

    def __init__(self) -> None:
        self.factor, self.constant, self.padding, self.reduction = 0.0, 0.0, -100, "mean"
        self.extra = False
        self.tensor = torch.zeros(()).double()
        self.weight = torch.ones(CLASSES).double()

    def factors(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.mT, target) + self.factor * output.pow(2).mean()

    def constants(self, output: Tensor, target: Tensor) -> Tensor:
        return penalised(output, target) + self.constant

    def tensors(self, output: Tensor, target: Tensor) -> Tensor:
        return penalised(output, target) + self.tensor

    def paddings(self, output: Tensor, target: Tensor) -> Tensor:
        kept = (target != -100).double() * (target != self.padding)
        return (output.pow(2).sum(dim=2) * kept).sum() / kept.sum() + output.abs().mean()

    def ignored(self, output: Tensor, target: Tensor) -> Tensor:
        target = torch.where(target == -100, self.padding, target)
        loss = functional.cross_entropy(output.mT, target.clamp(min=0), ignore_index=self.padding)
        return loss + output.abs().mean()

    def reductions(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.mT, target, reduction=self.reduction) + output.abs().mean()

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(output.mT, target)
        return loss + masked(output, target) if self.extra else loss

    def weights(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.mT, target, weight=self.weight) + output.abs().mean()

    def made_weights(self, output: Tensor, target: Tensor) -> Tensor:
        weight = torch.tensor([1.0, self.factor, 2.0, 1.0]).double()
        return functional.cross_entropy(output.mT, target, weight=weight) + output.abs().mean()

    def operands(self, output: Tensor, target: Tensor) -> Tensor:
        first, second = functional.cross_entropy(output.mT, target), output.pow(2).mean()
        return first + (first if self.extra else second)

    def change(self, step: int) -> None:
        """After step 5, which is between the steps that look anew, all is another."""
        self.factor = 0.1 * step
        if step == 5:
            self.constant, self.padding, self.reduction, self.extra = 3.0, 2, "sum", True
            self.tensor += 2.0
            self.weight[1] = 0.25


@pytest.mark.parametrize(
    "name",
    [
        *("factors", "constants", "tensors", "paddings", "ignored", "reductions", "terms", "weights"),
        *("made_weights", "operands"),
    ],
)
def test_what_changes_between_steps_is_seen(name):
    changing = Changing()
    check_steps(getattr(changing, name), changing.change)


def test_a_module_that_is_put_to_evaluation():
    class Switched(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return penalised(output, target) if self.training else masked(output, target)

    module = Switched()
    check_steps(module, lambda step: module.train(step != 5))


def test_a_loss_is_looked_into_ever_more_rarely():
    calls = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.cross_entropy(output.mT, target) + 0.1 * output.pow(2).mean()

    loss, of_steps = StepLoss(loss_fn), []
    for step in range(17):
        before = calls
        by_parts.by_parts(loss, *padded(8, step), 4)
        of_steps.append(calls - before)
    rare = {0, 1, 3, 7, 15}
    assert all((count == 4) == (step not in rare) for step, count in enumerate(of_steps))


def test_a_scale_in_the_target_is_that_of_the_step():
    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(output, target["value"]) * target["scale"] + output.abs().mean()

    loss = StepLoss(loss_fn)
    for step in range(STEPS):
        output = torch.randn(8, 3).double()
        target = {"value": torch.randn(8, 3).double(), "scale": torch.tensor(1.0 + step).double()}
        ours, _ = by_parts.by_parts(loss, output, target, 4)
        plain.assert_near(ours, by_parts.whole(loss_fn, output, target)[0], what=f"loss of step {step}")
