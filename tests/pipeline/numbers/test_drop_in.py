"""``out = pipe(x); loss(out).backward()`` in the place of the model: whatever plain code does with its output."""

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)
    ).double()


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.exp()


class Sums(nn.Module):
    def forward(self, nest: dict[str, Tensor]) -> Tensor:
        return nest["a"] + nest["b"].sum(1, keepdim=True)


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_of_which_a_part_is_not_used(used):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), Pair()).double()
    reference = plain.twin(model)
    x = torch.randn(7, 4).double()
    with cut_by_hand(model, [1, 2]) as pipe:
        pipe(x)[used].sum().backward()
    reference(x)[used].sum().backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_rows_of_an_output_that_are_not_used():
    model = network()
    reference = plain.twin(model)
    x = torch.randn(9, 4).double().requires_grad_()
    with cut_by_hand(model, [1, 3]) as pipe:
        pipe(x)[4:6].pow(2).sum().backward()
    ours, x.grad = x.grad, None
    reference(x)[4:6].pow(2).sum().backward()
    plain.assert_close({"x": ours}, {"x": x.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_nests_as_input_with_a_part_that_needs_no_gradient():
    model = nn.Sequential(Sums(), nn.Linear(4, 4), Pair()).double()
    reference = plain.twin(model)
    nest = {"a": torch.randn(7, 4).double().requires_grad_(), "b": torch.randn(7, 2).double()}
    with cut_by_hand(model, [1, 2]) as pipe:
        first, second = pipe(nest)
        (first * second).sum().backward()
    ours, nest["a"].grad = nest["a"].grad, None
    first, second = reference(nest)
    (first * second).sum().backward()
    plain.assert_close({"a": ours}, {"a": nest["a"].grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_gradients_of_the_input_alone_leave_the_parameters_alone(way):
    """As ``torch.autograd.grad`` does, which a penalty on gradients or a saliency map uses."""
    model = network()
    x = torch.randn(7, 4).double().requires_grad_()
    expected = torch.autograd.grad(model(x).pow(2).sum(), x)[0]
    start = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = start[name].clone()
    with cut_by_hand(model, [1, 3]) as pipe:
        loss = pipe(x).pow(2).sum()
        if way == "grad":
            found = torch.autograd.grad(loss, x)[0]
        else:
            loss.backward(inputs=[x])
            found = x.grad
    assert isinstance(found, Tensor)
    plain.assert_near(found, expected)
    plain.assert_same(plain.gradients(model), start)


def test_gradients_of_what_stands_before_the_pipeline():
    """A head whose gradient is asked for by name."""
    head, model = nn.Linear(3, 4).double(), network()
    x = torch.randn(7, 3).double()
    expected = torch.autograd.grad(model(head(x)).sum(), head.weight)[0]
    with cut_by_hand(model, [1, 3]) as pipe:
        found = torch.autograd.grad(pipe(head(x)).sum(), head.weight)[0]
    plain.assert_near(found, expected)
    assert all(gradient is None for gradient in plain.gradients(model).values())


def test_two_losses_of_one_output_in_one_backward():
    model = network()
    reference = plain.twin(model)
    x = torch.randn(7, 4).double()
    with cut_by_hand(model, [1, 3]) as pipe:
        output = pipe(x)
        torch.autograd.backward([output.sum(), output.pow(2).mean()])
    output = reference(x)
    torch.autograd.backward([output.sum(), output.pow(2).mean()])
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_hooks_on_the_output_see_its_gradient():
    model = network()
    x, seen = torch.randn(7, 4).double(), []
    with cut_by_hand(model, [1, 3]) as pipe:
        output = pipe(x)
        output.register_hook(lambda gradient: seen.append(gradient.clone()))
        output.mul(3).sum().backward()
    assert len(seen) == 1
    assert seen[0].equal(torch.full((7, 2), 3.0).double())


def test_a_second_derivative_is_refused():
    with cut_by_hand(network(), [1, 3]) as pipe:
        x = torch.randn(7, 4).double().requires_grad_()
        with pytest.raises(RuntimeError, match=r"create_graph=True: a pipeline has no second derivatives"):
            torch.autograd.grad(pipe(x).pow(3).sum(), x, create_graph=True)


def test_dropout_is_that_of_a_step():
    """The same seed, the same masks: losses and gradients of both forms."""
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 2)
    ).double()
    x, y = torch.randn(9, 4).double(), torch.randn(9, 2).double()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss()) as pipe:
        torch.manual_seed(7)
        stepped = pipe.step(x, target=y)
        gradients = plain.gradients(model)
        pipe.zero_grad()
        torch.manual_seed(7)
        loss = nn.functional.mse_loss(pipe(x), y)
        loss.backward()
        other = pipe(x)
    plain.assert_near(loss.detach(), stepped)
    plain.assert_close(plain.gradients(model), gradients)
    assert not other.equal(pipe_output(model, x))


def pipe_output(model: nn.Sequential, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    with cut_by_hand(model, [1, 3]) as pipe, torch.no_grad():
        return pipe(x)


def test_steps_and_outputs_in_turn():
    model = network()
    reference = plain.twin(model)
    x, y = torch.randn(9, 4).double(), torch.randn(9, 2).double()
    with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss()) as pipe:
        for _ in range(2):
            early = pipe(x)
            pipe.step(x, target=y)
            with torch.no_grad():
                pipe(x[:2])
            early.sum().backward()
    for _ in range(2):
        plain.whole_step(reference, x, y, nn.MSELoss())
        reference(x).sum().backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_plain_training_code_trains_to_the_same_parameters(recompute, schedule):
    model = network()
    reference = plain.twin(model)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference))
    with cut_by_hand(model, [1, 3], schedule=schedule, recompute=recompute) as pipe:
        for samples in (9, 2, 7, 1):
            x, y = torch.randn(samples, 4).double(), torch.randn(samples, 2).double()
            for each, optimizer in ((pipe, ours), (reference, theirs)):
                optimizer.zero_grad()
                nn.functional.mse_loss(each(x), y).backward()
                optimizer.step()
    plain.assert_close(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_an_input_that_is_written_before_the_backward_is_noticed(recompute):
    with cut_by_hand(network(), [1, 3], recompute=recompute) as pipe:
        x = torch.randn(7, 4).double()
        output = pipe(x)
        x.zero_()
        with pytest.raises(
            RuntimeError, match="the input of a pipeline was modified by an inplace operation"
        ):
            output.sum().backward()
        pipe(x).sum().backward()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_weights_that_are_written_before_the_backward_are_noticed(recompute):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cut_by_hand(model, [1, 3], recompute=recompute) as pipe:
        x = torch.randn(7, 4).double()
        pipe(x).sum().backward()
        output = pipe(x)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
