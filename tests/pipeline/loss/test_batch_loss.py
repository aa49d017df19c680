"""``reduction="batch"``: any loss, once a step on the gathered output; and gradients that are put right at the end."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pipepart
from pipepart import LossError
from tests.support import plain
from tests.support.chains import cut_by_hand

pytestmark = pytest.mark.usefixtures("short_profiles")


def network() -> nn.Sequential:
    return plain.in_double([nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)])


class Contrastive(nn.Module):
    """Every sample against all others of the batch, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.double))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        a, b = functional.normalize(output, dim=1), functional.normalize(target, dim=1)
        return functional.cross_entropy(a @ b.T * self.temperature, torch.arange(len(a)))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(11, 6).double(), torch.randn(11, 4).double()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_any_loss_is_exact_and_called_once_a_step(recompute):
    model, loss_fn, (x, y) = network(), Contrastive(), batch()
    reference, plain_loss = plain.twin(model), plain.twin(loss_fn)
    with cut_by_hand(
        model, [1], loss_fn=loss_fn, micro_batches=4, schedule="gpipe", recompute=recompute, reduction="batch"
    ) as pipe:
        loss = pipe.step(x, target=y)
        assert loss_fn.calls == 1
        plain.assert_near(pipe.evaluate(x, target=y), loss)
    plain.assert_near(loss, plain.whole_step(reference, x, y, plain_loss))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    plain.assert_close(plain.gradients(loss_fn), plain.gradients(plain_loss))


def test_auto_plans_a_schedule_that_runs_all_forwards_first():
    x, y = batch()
    with pipepart.Pipeline.auto(
        network(), x, target=y, loss_fn=Contrastive(), micro_batches=2, reduction="batch"
    ) as pipe:
        assert pipe.plan.schedule in ("gpipe", "looped-bfs")
        pipe.step(x, target=y)


def test_other_schedules_are_refused_with_the_line_to_write():
    with pytest.raises(LossError, match=r"pipepart\.plan\(profile, cluster, reduction='batch'\)"):
        cut_by_hand(network(), [1], loss_fn=Contrastive(), schedule="1f1b", reduction="batch")
    with pytest.raises(ValueError, match=r"reduction='batch' .* got schedule='1f1b'"):
        pipepart.Pipeline.auto(network(), batch()[0], schedule="1f1b", reduction="batch")
    with pytest.raises(LossError, match="needs a loss_fn"):
        cut_by_hand(network(), [1], schedule="gpipe", reduction="batch")


def positive(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    chosen = output > 0.1
    return ((output - target).pow(2) * chosen).sum(), chosen.sum()


@pytest.mark.parametrize("optimizer", [None, lambda parameters: torch.optim.SGD(parameters, lr=0.1)])
def test_a_count_of_the_output_is_put_right_at_the_end_of_the_step(optimizer):
    """Gradients of an earlier step, or of an optimizer of each stage, stay what they are."""
    model, (x, y) = network(), batch()
    reference = plain.twin(model)
    own: Any = optimizer
    with cut_by_hand(model, [1], loss_fn=positive, micro_batches=5, optimizer=own) as pipe:
        for _ in range(2):
            x.requires_grad_().grad = None
            pipe.step(x, target=y)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    again = x.detach().clone()
    for _ in range(2):
        if optimizer:
            theirs.zero_grad()
        again.requires_grad_().grad = None
        total, count = positive(reference(again), y)
        (total / count).backward()
        if optimizer:
            theirs.step()
    assert x.grad is not None
    assert again.grad is not None
    plain.assert_near(x.grad, again.grad)
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    plain.assert_close(model.state_dict(), reference.state_dict())


def test_a_refusal_in_the_middle_of_a_step_leaves_no_gradients():
    calls = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.mse_loss(output, target) * (2.0 if calls == 3 else 1.0)

    model, (x, y) = network(), batch()
    with cut_by_hand(model, [1], loss_fn=loss_fn, micro_batches=4) as pipe:
        with pytest.raises(LossError, match="something else than for micro-batch 0"):
            pipe.step(x, target=y)
        assert all(parameter.grad is None for parameter in model.parameters())
        pipe.step(x, target=y)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda output, target: functional.mse_loss(output.detach(), target),
        lambda output, target: (output - target).abs().long().sum(),
        lambda output, target: torch.tensor(1.0),
        lambda output, target: (output - target).to(torch.complex128).sum(),
    ],
)
def test_a_loss_without_a_gradient_is_refused(loss_fn):
    x, y = batch()
    with cut_by_hand(network(), [1], loss_fn=loss_fn) as pipe, pytest.raises(LossError):
        pipe.step(x, target=y)


def test_a_split_along_another_dimension_takes_a_sum_and_a_count():
    model, y = network(), torch.randn(7, 5, 4).double()
    reference, x = plain.twin(model), torch.randn(7, 5, 6).double()

    def by_columns(pair: Any, parts: int) -> Any:
        return list(zip(pair[0].split([2, 3], 1), pair[1].split([2, 3], 1), strict=True))

    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return functional.mse_loss(output, target, reduction="sum"), output.numel()

    made = cut_by_hand(model, [1], loss_fn=counted, micro_batches=2)
    made.close()
    with pipepart.Pipeline(model, made.plan, counted, split=by_columns) as pipe:
        loss = pipe.step(x, target=y)
    with (
        pipepart.Pipeline(network(), made.plan, nn.MSELoss(), split=by_columns) as pipe,
        pytest.raises(LossError, match="not split along its samples"),
    ):
        pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(reference, x, y, nn.MSELoss()))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
