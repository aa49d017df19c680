"""What training scripts do between steps, and models that only some pipelines get right, in both kinds of pipelines."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.conformance.layers import Double
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.tied import language_model, loss_fn, words
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")

each_kind = pytest.mark.parametrize("strict", [False, True], ids=["free", "strict"])
LOSS = nn.MSELoss()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4), torch.randn(samples, 4)


def test_gradients_keep_their_memory_layout_across_a_border():
    """A bias sums its gradient in the order of memory, so that another layout gives other last bits."""
    model = nn.Sequential(
        nn.Linear(16, 48), Calls(lambda x: x.t().contiguous().sigmoid().t()), nn.Linear(48, 16)
    )
    with cut_by_hand(model, [1], loss_fn=LOSS) as pipe:
        plain.check_step(pipe, torch.randn(99, 16), torch.randn(99, 16), LOSS)


def test_writing_over_what_a_layer_has_saved_is_refused_as_torch_refuses_it():
    """A sigmoid needs its output in its backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Double())
    x, y = batch()
    with (
        cut_by_hand(model, [2], loss_fn=LOSS) as pipe,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        pipe.step(x, target=y)


def test_an_input_that_a_second_forward_needs_is_left_alone():
    x, y = torch.ones(6, 4), torch.randn(6, 4)
    with cut_by_hand(nn.Sequential(Double(), nn.Linear(4, 4)), [1], loss_fn=LOSS, recompute="always") as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
    assert x.eq(1).all()


def test_a_model_frozen_as_a_whole_gives_its_loss_and_no_gradient():
    model = network().requires_grad_(False)
    x, y = batch()
    with cut_by_hand(model, [1], loss_fn=LOSS) as pipe:
        plain.assert_near(pipe.step(x, target=y), LOSS(model(x), y), 1e-6)
        assert not pipe(x).requires_grad
        assert pipe(x.requires_grad_()).requires_grad
    assert all(gradient is None for gradient in plain.gradients(model).values())


def test_sparse_gradients_stay_sparse():
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(18, 4))
    with cut_by_hand(model, [1], loss_fn=nn.CrossEntropyLoss()) as pipe:
        pipe.step(torch.randint(9, (7, 3)), target=torch.randint(4, (7,)))
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    assert gradient.is_sparse


@each_kind
def test_gradients_that_the_caller_has_changed(strict):
    """They are the host's when the next step adds to them."""
    model = network()
    reference = plain.twin(model)
    x, y = batch()
    with cut_by_hand(model, [1], loss_fn=LOSS, strict=strict) as pipe:
        for step in range(2):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, LOSS, 3)
            if step == 0:
                for parameter in (*model.parameters(), *reference.parameters()):
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad * 0.5
        norm = pipe.clip_grad_norm_(0.1)
    assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@each_kind
def test_parameters_that_the_caller_has_replaced(strict):
    model, other = network(), network()
    reference = plain.twin(other)
    x, y = batch()
    with cut_by_hand(model, [1], loss_fn=LOSS, strict=strict) as pipe:
        pipe.step(x, target=y)
        pipe.zero_grad()
        model.load_state_dict(other.state_dict(), assign=True)
        pipe.step(x, target=y)
        pipe.zero_grad()
        weight = model.get_parameter("2.weight")
        weight.data = weight.data.clone()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, LOSS, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@each_kind
def test_a_model_that_is_cut_again_and_again(strict):
    """With a parameter that stages share: layers that hold it were on other devices before."""
    model = language_model()
    reference = plain.twin(model)
    x, y = words()
    for borders in ([1], [3, 5], [2]):
        with cut_by_hand(model, borders, loss_fn=loss_fn, strict=strict) as pipe:
            pipe.step(x, target=y)
            if strict:
                assert pipe.memory()["virtual:0"].by_category["parameters"] > 0
        plain.micro_batched_step(reference, x, y, loss_fn, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@each_kind
def test_autocast_of_the_caller_holds_in_every_forward_and_in_no_backward(strict):
    """Inputs are cast for each use, as within a model: a layer that leaves autocast keeps full precision."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            first, second, third = (part(x) for part in self.parts)
            return first * second + third

    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float())

    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(32, 32), Full(), Three(), Full(), nn.Linear(32, 4))
    reference = plain.twin(model)
    recompute = ("never", "always", "except-last")
    with cut_by_hand(
        model, [2, 3], loss_fn=LOSS, micro_batches=2, strict=strict, recompute=recompute
    ) as pipe:
        for kept in (True, False):
            x, y = torch.randn(8, 32), torch.randn(8, 4)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kept):
                pipe.step(x, target=y)
            for xs, ys in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kept):
                    loss = nn.functional.mse_loss(reference(xs), ys) / 2
                loss.backward()
            plain.assert_same(plain.gradients(model), plain.gradients(reference))
            assert {enabled for enabled, _ in seen} == {kept}
            seen.clear()
