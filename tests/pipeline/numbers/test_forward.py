"""``pipe(x)``: the plain model's output, and its gradients where they are wanted."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("samples", [1, 2, 7])
def test_the_output_is_the_plain_models(mode, samples):
    model = network().double()
    x = torch.randn(samples, 4).double()
    with cut_by_hand(model, [1, 3]) as pipe, mode():
        output = pipe(x)
    plain.assert_near(output.detach(), model(x).detach())
    assert output.requires_grad == (mode is contextlib.nullcontext)
    assert output.is_inference() == (mode is torch.inference_mode)


def test_evaluation_uses_running_statistics_and_leaves_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(torch.randn(9, 4), target=torch.randn(9, 2))
        assert pipe.eval() is pipe
        assert not pipe.training
        assert not any(module.training for module in model.modules())
        before = {name: tensor.clone() for name, tensor in model.named_buffers()}
        x = torch.randn(7, 4)
        with torch.no_grad():
            plain.assert_near(pipe(x), model(x), 1e-6)
        plain.assert_same(dict(model.named_buffers()), before)
        assert pipe.train() is pipe
        assert all(module.training for module in model.modules())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
def test_the_output_can_be_differentiated(schedule):
    """A loss of the caller's on the gathered output: gradients of parameters and input."""
    model = network().double()
    reference = plain.twin(model)
    x = torch.randn(7, 4).double().requires_grad_()
    with cut_by_hand(model, [1, 3], micro_batches=3, schedule=schedule) as pipe:
        pipe(x).pow(3).sum().backward()
    assert x.grad is not None
    ours, x.grad = x.grad, None
    reference(x).pow(3).sum().backward()
    assert x.grad is not None
    plain.assert_near(ours, x.grad)
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_whole_mini_batch_loss_needs_no_reduction():
    """The largest value of the batch is no sum of its micro-batches' and yet exact here."""
    model = network().double()
    reference = plain.twin(model)
    x = torch.randn(7, 4).double()
    with cut_by_hand(model, [2]) as pipe:
        pipe(x).max().backward()
    reference(x).max().backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_two_outputs_before_a_backward():
    model = network().double()
    reference = plain.twin(model)
    x, z = torch.randn(7, 4).double(), torch.randn(5, 4).double()
    with cut_by_hand(model, [1, 3]) as pipe:
        first, second = pipe(x), pipe(z)
        (first.sum() * second.pow(2).mean()).backward()
    (reference(x).sum() * reference(z).pow(2).mean()).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_outputs_can_go_backward_in_any_order_with_a_step_between():
    model = network().double()
    reference = plain.twin(model)
    x, z, y = torch.randn(7, 4).double(), torch.randn(5, 4).double(), torch.randn(5, 2).double()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss()) as pipe:
        first, second = pipe(x), pipe(z)
        second.sum().backward()
        pipe.step(z, target=y)
        first.sum().backward()
    reference(x).sum().backward()
    reference(z).sum().backward()
    plain.whole_step(reference, z, y, nn.MSELoss())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_an_output_fed_back_as_input():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    reference = plain.twin(model)
    x = torch.randn(7, 4).double()
    with cut_by_hand(model, [1]) as pipe:
        pipe(pipe(x)).pow(2).sum().backward()
    reference(reference(x)).pow(2).sum().backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_pipeline_inside_a_larger_graph():
    head, tail = nn.Linear(3, 4).double(), nn.Linear(2, 1).double()
    model = network().double()
    whole = plain.twin(nn.Sequential(head, *model, tail))
    x = torch.randn(7, 3).double()
    with cut_by_hand(model, [2]) as pipe:
        tail(pipe(head(x).tanh())).sum().backward()
    first, *middle, last = whole.children()
    last(nn.Sequential(*middle)(first(x).tanh())).sum().backward()
    ours = plain.gradients(nn.Sequential(head, *model, tail))
    plain.assert_close(ours, plain.gradients(whole))


def test_a_nest_of_outputs():
    class Fork(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"value": x * 2, "choice": x.argmax(dim=1), "pair": (x.sum(dim=1), "label")}

    model = nn.Sequential(nn.Linear(4, 4), Fork()).double()
    reference = plain.twin(model)
    x = torch.randn(7, 4).double()
    pipe = cut_by_hand(model, [1])
    output = pipe(x)
    expected = reference(x)
    plain.assert_near(output["value"].detach(), expected["value"].detach())
    assert output["choice"].equal(expected["choice"])
    assert not output["choice"].requires_grad
    assert output["pair"][1] == "label"
    (output["value"].mean() + output["pair"][0].sum()).backward()
    pipe.close()
    (expected["value"].mean() + expected["pair"][0].sum()).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_an_input_that_only_some_micro_batches_use_has_zeros_in_the_others():
    class Choose(nn.Module):
        def forward(self, nest: dict[str, Tensor]) -> Tensor:
            return nest["a"] * 2 if bool(nest["a"].detach().sum() > 0) else nest["b"] * 3

    model = nn.Sequential(Choose(), nn.Identity())
    nest = {
        "a": torch.tensor([[1.0], [-1.0]], requires_grad=True),
        "b": torch.ones(2, 1, requires_grad=True),
    }
    with cut_by_hand(model, [1], micro_batches=2) as pipe:
        pipe(nest).sum().backward()
    assert nest["a"].grad is not None
    assert nest["a"].grad.tolist() == [[2.0], [0.0]]
    assert nest["b"].grad is not None
    assert nest["b"].grad.tolist() == [[0.0], [3.0]]


def test_a_second_backward_through_the_same_output_is_refused():
    with cut_by_hand(network(), [1]) as pipe:
        loss = pipe(torch.randn(6, 4)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_frozen_models_give_outputs_without_gradient():
    model = network().requires_grad_(False)
    with cut_by_hand(model, [2]) as pipe:
        assert not pipe(torch.randn(6, 4)).requires_grad
        assert pipe(torch.randn(6, 4, requires_grad=True)).requires_grad


@pytest.mark.parametrize("call", ["step", "forward"])
def test_autocast_of_the_caller_holds_in_every_stage(call):
    class Remember(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x

    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(8, 8), Remember(), nn.Linear(8, 8), Remember(), nn.Linear(8, 3))
    reference = plain.twin(model)
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    with cut_by_hand(model, [2, 4], loss_fn=nn.CrossEntropyLoss()) as pipe:
        if call == "step":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.step(x, target=y)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(pipe(x), y)
            loss.backward()
        assert set(seen) == {torch.bfloat16}
        seen.clear()
        pipe(x)
        assert set(seen) == {torch.float32}
    if call == "step":
        for xs, ys in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(reference(xs), ys) * (2 / 6)
            loss.backward()
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(reference(x), y)
        loss.backward()
        plain.assert_close(plain.gradients(model), plain.gradients(reference), 0.02)


def test_autocast_casts_the_input_of_a_stage_for_each_use():
    """As it does within a model. A leaf is cast once, and the gradients of its uses are summed in low precision."""

    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = (part(x) for part in self.parts)
            return first * second + third

    model = nn.Sequential(nn.Linear(32, 32), Full(), Three(), nn.Linear(32, 4))
    reference = plain.twin(model)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=2) as pipe:
        for _ in range(3):
            x, y = torch.randn(8, 32), torch.randn(8, 4)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.step(x, target=y)
            for xs, ys in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(reference(xs), ys) / 2
                loss.backward()
            plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_autocast_of_a_step_does_not_reach_into_its_backward():
    """A layer that leaves autocast keeps full precision there, as where ``backward`` is called outside of it."""

    class FullPrecision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float())

    model = nn.Sequential(nn.Linear(16, 16), FullPrecision(), nn.Linear(16, 3))
    reference = plain.twin(model)
    x, y = torch.randn(6, 16), torch.randint(3, (6,))
    with (
        cut_by_hand(model, [2], loss_fn=nn.CrossEntropyLoss()) as pipe,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        pipe.step(x, target=y)
    for xs, ys in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(reference(xs), ys) * (2 / 6)
        loss.backward()
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
