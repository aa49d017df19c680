"""A step gives loss and gradients of the whole mini-batch, for batches of any size, over several steps."""

import pytest
import torch
from torch import nn

from tests.support import plain
from tests.support.chains import cut_by_hand


@pytest.mark.parametrize(
    ("schedule", "dtype", "samples"),
    [
        ("1f1b", torch.float32, 10),
        ("gpipe", torch.float64, 2),
        ("sequential", torch.bfloat16, 16),
        ("1f1b", torch.bfloat16, 1),
    ],
)
def test_convolutions_equal_micro_batched_training_bit_for_bit(dtype, schedule, samples):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).to(dtype)
    x, y = torch.randn(samples, 2, 7, 7, dtype=dtype), torch.randint(3, (samples,))
    reference = plain.twin(model)
    with cut_by_hand(
        model, [2, 5], loss_fn=nn.CrossEntropyLoss(), micro_batches=4, schedule=schedule
    ) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.CrossEntropyLoss(), min(4, samples))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_gradients_keep_their_memory_layout_across_a_border():
    """A bias sums its gradient in the order of memory, so that another layout gives other last bits."""

    class Transposed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.t().contiguous().sigmoid().t()

    model = nn.Sequential(nn.Linear(16, 48), Transposed(), nn.Linear(48, 16))
    reference = plain.twin(model)
    x, y = torch.randn(99, 16), torch.randn(99, 16)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_a_layer_a_stage_up_to_five_stages(stages):
    model = plain.in_double([nn.Linear(4, 4) for _ in range(stages)])
    reference = plain.twin(model)
    x, y = torch.randn(7, 4).double(), torch.randn(7, 4).double()
    with cut_by_hand(model, range(1, stages), loss_fn=nn.MSELoss(), micro_batches=3) as pipe:
        assert len(pipe.plan.stages) == stages
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(reference, x, y, nn.MSELoss()))
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_batch_of_another_size_follows():
    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)])
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
        for samples in (8, 3, 1, 9):
            pipe.zero_grad()
            reference = plain.twin(model)
            x, y = torch.randn(samples, 4).double(), torch.randn(samples, 1).double()
            loss = pipe.step(x, target=y)
            plain.assert_near(loss, plain.whole_step(reference, x, y, nn.MSELoss()))
            plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_steps_add_their_gradients_up():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    reference = plain.twin(model)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=2) as pipe:
        for _ in range(3):
            x, y = torch.randn(6, 4), torch.randn(6, 1)
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 2)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_the_loss_is_a_scalar_without_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step(torch.randn(6, 4), target=torch.zeros(6, 1))
    assert loss.shape == ()
    assert not loss.requires_grad
    assert loss.dtype == torch.float32


def test_step_is_refused_where_the_caller_has_switched_gradients_off():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x, y = torch.randn(6, 4), torch.zeros(6, 1)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are disabled here"):
            pipe.step(x, target=y)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_an_input_that_asks_for_a_gradient_gets_it():
    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)])
    reference = plain.twin(model)
    x, y = torch.randn(7, 4).double().requires_grad_(), torch.zeros(7, 1).double()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    assert x.grad is not None
    ours, x.grad = x.grad, None
    plain.whole_step(reference, x, y, nn.MSELoss())
    assert x.grad is not None
    plain.assert_near(ours, x.grad)


def test_the_gradient_goes_on_into_the_graph_that_made_the_input():
    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)])
    reference = plain.twin(model)
    start, y = torch.randn(7, 4).double().requires_grad_(), torch.zeros(7, 1).double()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(torch.tanh(start), target=y)
    assert start.grad is not None
    ours, start.grad = start.grad, None
    plain.whole_step(reference, torch.tanh(start), y, nn.MSELoss())
    assert start.grad is not None
    plain.assert_near(ours, start.grad)
