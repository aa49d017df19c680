"""``step`` gives the numbers of the plain model: loss and gradients of the whole mini-batch."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import plain
from tests.support.chains import cut_by_hand

SCHEDULES = ("1f1b", "gpipe", "sequential")


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class InPlaceReLU(nn.Module):
    """A linear layer with a ReLU that writes over its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu_()


WIDTH = 5
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "residual": lambda: Residual(WIDTH),
    "in place": lambda: InPlaceReLU(WIDTH),
    "identity": nn.Identity,
    "nested": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)),
}
LOSSES = {
    "mse mean": (nn.MSELoss(), True),
    "mse sum": (nn.MSELoss(reduction="sum"), False),
    "huber": (nn.functional.huber_loss, True),
    "lambda mean": (lambda output, target: (output - target).abs().mean(), True),
    "lambda sum": (lambda output, target: (output - target).pow(4).sum(), False),
}


@st.composite
def trainings(draw):
    """A chain, its borders, a mini-batch, a schedule, a number of micro-batches and a loss."""
    chain = [
        LAYERS[kind]() for kind in draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6))
    ]
    model = plain.in_double([nn.Linear(3, WIDTH), *chain, nn.Linear(WIDTH, 2)])
    layers = sum(3 if isinstance(module, nn.Sequential) else 1 for module in model)
    borders = draw(st.lists(st.integers(1, layers - 1), unique=True, max_size=4).map(sorted))
    samples = draw(st.integers(1, 12))
    x, y = torch.randn(samples, 3, dtype=torch.double), torch.randn(samples, 2, dtype=torch.double)
    micro_batches = draw(st.integers(1, 8))
    return (
        model,
        borders,
        x,
        y,
        draw(st.sampled_from(SCHEDULES)),
        micro_batches,
        draw(st.sampled_from(sorted(LOSSES))),
    )


def check_against_plain(training) -> None:
    model, borders, x, y, schedule, micro_batches, loss_name = training
    loss_fn, mean = LOSSES[loss_name]
    whole, parts = plain.twin(model), plain.twin(model)
    with cut_by_hand(model, borders, loss_fn=loss_fn, micro_batches=micro_batches, schedule=schedule) as pipe:
        loss = pipe.step(x, target=y)
    expected = plain.whole_step(whole, x, y, loss_fn)
    plain.micro_batched_step(parts, x, y, loss_fn, min(micro_batches, len(x)), mean)
    plain.assert_near(loss, expected)
    plain.assert_close(plain.gradients(model), plain.gradients(whole))
    plain.assert_same(plain.gradients(model), plain.gradients(parts))


@given(trainings())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_loss_and_gradients_equal_the_plain_models(training):
    """To 1e-12 those of the whole mini-batch, bit for bit those of its micro-batches one after the other."""
    check_against_plain(training)


@pytest.mark.slow
@given(trainings())
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_loss_and_gradients_of_many_models_equal_the_plain_models(training):
    check_against_plain(training)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("samples", [1, 2, 10, 16])
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
