"""Recomputation changes what is kept and nothing that a caller sees: each layer's effects are those of one forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.pipeline.conformance.layers import WritesSometimes
from tests.support import plain
from tests.support.chains import cut_by_hand

LOSS = nn.MSELoss()
X, Y = torch.randn(2, 8, 3)


class DoublesPositive(nn.Module):
    """Writes over its input in micro-batches with a positive mean."""

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x.mul_(2)
        return x * 1


def test_a_micro_batch_whose_input_a_stage_writes_over_keeps_its_graph():
    """A second forward would have other values to begin with."""
    model = plain.in_double([DoublesPositive(), nn.Linear(3, 3), nn.Linear(3, 3)])
    x = torch.cat([-X[:2].abs(), X[2:].abs()]).double()
    twin = plain.twin(model)
    expected = plain.micro_batched_step(twin, x.clone(), Y.double(), LOSS, 4)
    with cut_by_hand(model, [2], loss_fn=LOSS, micro_batches=4, recompute="always") as pipe:
        torch.testing.assert_close(pipe.step(x.clone(), target=Y.double()), expected)
    plain.assert_close(plain.gradients(model), plain.gradients(twin))


class Steps(nn.Module):
    """Counts its forwards, by whether they are to be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return x * 1


@pytest.mark.parametrize(("mode", "forwards"), [("never", 4), ("except-last", 7), ("always", 8)])
def test_how_often_a_layer_runs_and_the_loss_runs_once(mode, forwards):
    """And nothing runs twice where no backward is needed."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if output.device.type == "cpu":  # else it is called on no values, to see what its mean is of
            losses.append(len(output))
        return functional.mse_loss(output, target)

    def counts(call: Any) -> list[list[bool]]:
        """The forwards of both layers that count."""
        losses.clear()
        for one in counting:
            one.calls.clear()
        call()
        return [one.calls for one in counting]

    losses: list[int] = []
    counting = Steps(), Steps()
    model = nn.Sequential(nn.Linear(3, 3), counting[0], nn.Linear(3, 3), counting[1])
    with cut_by_hand(model, [2], loss_fn=loss_fn, micro_batches=4, recompute=mode, reduction="mean") as pipe:
        pipe.step(X, target=Y)
        assert counts(lambda: pipe.step(X, target=Y)) == [[True] * forwards] * 2
        assert losses.count(2) == 4  # beside a smaller one, to see what its mean is of
        assert counts(lambda: pipe(X).sum().backward()) == [[True] * forwards] * 2
        model[0].requires_grad_(False)
        assert list(map(len, counts(lambda: pipe.step(X, target=Y)))) == [4, forwards]
        model.requires_grad_(False)
        assert list(map(len, counts(lambda: pipe.step(X, target=Y)))) == [4, 4]
        model.requires_grad_(True)
        with torch.no_grad():
            assert counts(lambda: pipe(X)) == [[False] * 4] * 2


def test_batch_norm_that_changes_its_mode_between_steps():
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3))
    reference = plain.twin(model)
    with cut_by_hand(model, [1], loss_fn=LOSS, micro_batches=4, recompute="always") as pipe:
        for training in (False, True, False, True):
            norm.train(training)
            reference.get_submodule("1").train(training)
            pipe.step(X, target=Y)
            plain.micro_batched_step(reference, X, Y, LOSS, 4)
    assert norm.num_batches_tracked == 8
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


def check_first_write(schedule: str) -> None:
    """A buffer that is written from the third micro-batch of a step on, and read in all."""
    x, y = torch.randn(2, 8, 6).double()
    x[:4, 0], x[4:, 0] = -1, 1
    model = plain.in_double([nn.Identity(), WritesSometimes(6), nn.Linear(6, 6)])
    reference = plain.twin(model)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    how: dict[str, Any] = {"micro_batches": 4, "schedule": schedule, "recompute": "always"}
    with cut_by_hand(model, [2], loss_fn=LOSS, **how) as pipe:
        for _ in range(2):
            pipe.step(ours, target=y)
            plain.micro_batched_step(reference, theirs, y, LOSS, 4)
    plain.assert_same({"input": ours.grad}, {"input": theirs.grad})
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_buffer_that_is_first_written_in_the_middle_of_a_step():
    """There is no copy at that micro-batch: its graph is kept. Others in flight would read a value that is gone."""
    check_first_write("sequential")
    with pytest.raises(RuntimeError, match=r"buffer 1\.\w+ was first written by a later micro-batch"):
        check_first_write("gpipe")


def test_a_buffer_that_is_written_through_another_reference_is_refused_by_name():
    class Hidden(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.all = [self.count]

        def forward(self, x: Tensor) -> Tensor:
            self.all[0].add_(1)
            return x * 1

    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Hidden()), nn.Linear(3, 3))
    with (
        cut_by_hand(model, [1], loss_fn=LOSS, recompute="always") as pipe,
        pytest.raises(RuntimeError, match=r"buffer 1\.0\.count was written .* updated twice") as caught,
    ):
        pipe.step(X, target=Y)
    assert "stage 1 of 2" in caught.value.__notes__[-1]
