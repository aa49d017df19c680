"""Replicas of the model train as one and are, at every step, what the user has made of the model."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import plan_by_hand
from tests.support.replicas import IN_TURN, batch, cut_in_two, cut_replicas, model_for, summed_step

LOSS = nn.MSELoss()


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 2), ("gpipe", 3), ("zb-h1", 2), ("chimera", 1)])
def test_the_pipeline_itself_computes_and_differentiates_in_copies(schedule, copies):
    """Two outputs, one backward."""
    model = model_for(1)
    reference = plain.twin(model)
    x, other = batch()[0], batch()[0]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with cut_in_two(model, copies, schedule=schedule) as pipe:
        with torch.no_grad():
            plain.assert_near(pipe(x).detach(), reference(x).detach())
        (pipe(ours).square().sum() + pipe(other).sum()).backward()
    (reference(theirs).square().sum() + reference(other).sum()).backward()
    plain.assert_close({"input": ours.grad}, {"input": theirs.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_fewer_samples_than_copies_leave_some_idle():
    model = model_for(1)
    reference = plain.twin(model)
    x, y = batch(1)
    with cut_in_two(model, 3) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(reference, x, y, LOSS))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


class Late(nn.Module):
    """Takes its time in the second copy."""

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread().name.endswith("virtual:1"):
            time.sleep(0.05)
        return x


def test_a_failure_in_the_loss_of_one_copy_ends_the_others():
    def fails_for_large(output: Tensor, target: Tensor):
        if float(target.max()) > 5:
            raise ArithmeticError("large")
        return (output - target).sum(), (output > 0).sum()

    model = plain.in_double([nn.Linear(3, 4), Late(), nn.Linear(4, 4)])
    x, y = batch()
    y[2:4] = 9  # of micro-batch 1, the first of the second copy
    pipe = cut_replicas(model, [], 2, loss_fn=fails_for_large, schedule="gpipe")
    with pipe, pytest.raises(ArithmeticError, match="large"):
        pipe.step(x, target=y)


@pytest.mark.parametrize("strict", [False, True])
def test_buffers_of_a_loss_may_be_read_and_not_written(strict):
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.get_buffer("calls").add_(1)
            return nn.functional.mse_loss(output, target)

    model = model_for(1)
    reference = plain.twin(model)
    plan = plan_by_hand(list("0123"), [2], replicas=2, micro_batches=4)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    x, y = batch()
    classes = torch.randint(4, (8,))
    with Pipeline(model, plan, loss_fn, strict=strict) as pipe:
        plain.assert_near(pipe.step(x, target=classes), plain.whole_step(reference, x, classes, loss_fn))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    with (
        Pipeline(model, plan, Counts(), strict=True) as pipe,
        pytest.raises(ValueError, match="the loss writes its buffer 'calls'"),
    ):
        pipe.step(x, target=y)


class Scaled(nn.Module):
    """Scales by a buffer, and by a tensor that is none."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.other = torch.ones(4, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.other.to(x.dtype)


def followed() -> nn.Sequential:
    return plain.in_double([nn.Linear(3, 4), nn.Dropout(0.5), Scaled(), nn.Linear(4, 4)]).eval()


def untraced(model: Any) -> None:
    version = model[0].weight._version
    model[0].weight.data.mul_(3)
    assert model[0].weight._version == version


CHANGES: dict[str, Any] = {
    "a write that leaves no trace": untraced,
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "mode": lambda model: setattr(model.train()[1], "p", 0.0),
    "rate of a dropout": lambda model: setattr(model.train()[1], "p", 1.0),
    "dtype": nn.Module.float,
    "values of a buffer": lambda model: model[2].scale.fill_(2),
    "another buffer of another shape": lambda model: setattr(
        model[2], "scale", torch.full((1,), 5.0, dtype=torch.double)
    ),
    "another tensor": lambda model: setattr(model[2], "other", model[2].other * 2),
    "values of a tensor": lambda model: model[2].other.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copies_follow_what_the_user_changes_between_steps(change):
    model = followed()
    x, y = batch()
    with cut_in_two(model) as pipe:
        pipe.step(x, target=y)
        pipe.zero_grad()
        CHANGES[change](model)
        reference = plain.twin(model)
        if change == "dtype":
            x, y = x.float(), y.float()
        loss = pipe.step(x, target=y)
        plain.assert_near(
            loss, summed_step(reference, x, y, LOSS, IN_TURN), 1e-6 if change == "dtype" else 1e-12
        )
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
        model.eval()
        plain.assert_near(pipe(x).detach(), model(x).detach(), 1e-6 if change == "dtype" else 1e-12)
