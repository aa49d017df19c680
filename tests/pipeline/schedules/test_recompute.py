"""Recomputation changes what is kept and nothing that a caller sees: each layer's effects are those of one forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipepart.capture import flatten
from pipepart.runtime.replay.buffers import Buffers
from tests.pipeline.conformance.layers import WritesSometimes
from tests.support import plain
from tests.support.chains import Recompute, cut_by_hand

MODES: tuple[Recompute, ...] = ("except-last", "always")
LOSS = nn.MSELoss()


class Steps(nn.Module):
    """Counts its forwards, by whether they are to be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return x * 1


def batch(samples: int = 8, width: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, width), torch.randn(samples, width)


@pytest.mark.parametrize(("mode", "forwards"), [("never", 4), ("except-last", 7), ("always", 8)])
def test_how_often_a_layer_runs_and_the_loss_runs_once(mode, forwards):
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if output.device.type == "cpu":  # else it is called on no values, to see what its mean is of
            losses.append(len(output))
        return functional.mse_loss(output, target)

    losses: list[int] = []
    steps = Steps()
    model = nn.Sequential(nn.Linear(3, 3), steps, nn.Linear(3, 3))
    x, y = batch()
    with cut_by_hand(model, [1], loss_fn=loss_fn, micro_batches=4, recompute=mode, reduction="mean") as pipe:
        pipe.step(x, target=y)
        steps.calls.clear()
        losses.clear()
        pipe.step(x, target=y)
        assert losses.count(2) == 4  # beside a smaller one, to see what its mean is of
        pipe(x).sum().backward()
    assert steps.calls == [True] * 2 * forwards


@pytest.mark.parametrize("mode", MODES)
def test_nothing_runs_twice_where_no_backward_is_needed(mode):
    first, second = Steps(), Steps()
    model = nn.Sequential(nn.Linear(3, 3), first, nn.Linear(3, 3), second)
    x, y = batch()
    with cut_by_hand(model, [2], loss_fn=LOSS, micro_batches=4, recompute=mode) as pipe:
        model[0].requires_grad_(False)
        pipe.step(x, target=y)
        assert len(first.calls) == 4
        assert len(second.calls) == (7 if mode == "except-last" else 8)
        model.requires_grad_(False)
        second.calls.clear()
        pipe.step(x, target=y)
        assert len(second.calls) == 4
        first.calls.clear()
        model.requires_grad_(True)
        with torch.no_grad():
            pipe(x)
        assert first.calls == [False] * 4


def test_batch_norm_that_changes_its_mode_between_steps():
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3))
    reference = plain.twin(model)
    x, y = batch(10)
    with cut_by_hand(model, [1], loss_fn=LOSS, micro_batches=5, recompute="always") as pipe:
        for training in (False, True, False, True):
            norm.train(training)
            reference.get_submodule("1").train(training)
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, LOSS, 5)
    assert norm.num_batches_tracked == 10
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


def check_first_write(size: int, schedule: str) -> None:
    """A buffer that is written from the third micro-batch of a step on, and read in all."""
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    x[:4, 0], x[4:, 0] = -1, 1
    model = nn.Sequential(nn.Identity(), WritesSometimes(size), nn.Linear(6, 6)).double()
    reference = plain.twin(model)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with cut_by_hand(
        model, [2], loss_fn=LOSS, micro_batches=4, schedule=schedule, recompute="always"
    ) as pipe:
        for _ in range(2):
            pipe.step(ours, target=y)
            plain.micro_batched_step(reference, theirs, y, LOSS, 4)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad.equal(theirs.grad)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_buffer_that_is_first_written_in_the_middle_of_a_step():
    """There is no copy at that micro-batch: its graph is kept instead."""
    check_first_write(6, "sequential")


def test_a_buffer_that_is_first_written_while_other_micro_batches_are_in_flight():
    """Their second forwards would read the value of before, of which there is no copy."""
    with pytest.raises(RuntimeError, match=r"buffer 1\.\w+ was first written by a later micro-batch"):
        check_first_write(6, "gpipe")


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
    x, y = batch()
    with (
        cut_by_hand(model, [1], loss_fn=LOSS, recompute="always") as pipe,
        pytest.raises(RuntimeError, match=r"buffer 1\.0\.count was written .* updated twice") as caught,
    ):
        pipe.step(x, target=y)
    assert "stage 1 of 2" in caught.value.__notes__[-1]


@pytest.mark.parametrize(("training", "copies"), [(True, [5, 3]), (False, [5, 0])])
def test_constants_are_copied_once_in_each_mode(training, copies):
    """Only what a forward writes is copied at each micro-batch."""

    class Masked(nn.Module):
        mask: Tensor
        large: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4))
            self.register_buffer("large", torch.ones(20_000))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask * self.large[:4]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal copied
            copied += func is torch.ops.aten.clone.default
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(4, 4), Masked(), nn.Linear(4, 4), nn.BatchNorm1d(4)).train(training)
    buffers = Buffers(flatten(model))
    for expected in copies:
        copied = 0
        with Watch():
            noted = buffers.note()
            model(torch.randn(10, 4))
            values = buffers.values(noted)
        assert copied == expected
        assert values is not None
        assert sorted(name for _, name in values) == (
            ["num_batches_tracked", "running_mean", "running_var"] if training else []
        )
