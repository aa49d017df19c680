"""``out = pipe(x); loss(out).backward()`` in the place of the model: whatever plain code does with its output."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.two_parts import Calls


def network(*last: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.LayerNorm(6)]
    return plain.in_double([*layers, *(last or [nn.Linear(6, 4)])])


def pair() -> nn.Sequential:
    return network(Calls(lambda x: (x.tanh(), x.exp())))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("samples", "strict"), [(1, False), (7, True)])
def test_the_output_is_the_plain_models_without_gradients(mode, samples, strict):
    model, x = network(), torch.randn(samples, 4).double()
    with cut_by_hand(model, [1, 3], strict=strict) as pipe, mode():
        output = pipe(x)
    plain.assert_near(output, model(x).detach())
    assert not output.requires_grad
    assert output.is_inference() == (mode is torch.inference_mode)


# What a script may do with a model and an input.
USES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Any]]] = {
    "the second of two outputs": (pair, lambda run, x: run(x)[1].sum().backward()),
    "some rows": (network, lambda run, x: run(x)[4:6].pow(2).sum().backward()),
    "one backward of two outputs": (
        network,
        lambda run, x: (run(x).sum() * run(x[:5]).pow(2).mean()).backward(),
    ),
    "outputs that go backward in the other order": (
        network,
        lambda run, x: [out.pow(2).sum().backward() for out in reversed([run(x), run(x[:5])])],
    ),
    "an output that is fed back": (network, lambda run, x: run(run(x)).pow(2).sum().backward()),
    "a graph before and behind": (network, lambda run, x: run(x.tanh() * 2).sin().sum().backward()),
}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("use", USES)
def test_gradients_are_the_plain_models(use, recompute):
    make, do = USES[use]
    model = make()
    reference = plain.twin(model)
    ours = torch.randn(9, 4).double().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    with cut_by_hand(model, [1, 3], recompute=recompute) as pipe:
        do(pipe, ours)
    do(reference, theirs)
    plain.assert_close({"input": ours.grad}, {"input": theirs.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_gradients_of_the_input_alone_leave_the_parameters_alone(way):
    """As ``torch.autograd.grad`` does, which a penalty on gradients or a saliency map uses."""
    model = network()
    x = nn.Linear(4, 4).double()(torch.randn(7, 4).double()).detach().requires_grad_()
    expected = torch.autograd.grad(model(x).pow(2).sum(), x)[0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    start = plain.gradients(model)
    with cut_by_hand(model, [1, 3]) as pipe:
        loss = pipe(x).pow(2).sum()
        if way == "grad":
            found = torch.autograd.grad(loss, x)[0]
        else:
            loss.backward(inputs=[x])
            found = x.grad
    plain.assert_close({"x": found}, {"x": expected})
    plain.assert_same(plain.gradients(model), start)


def test_second_derivatives_and_second_backwards_are_refused():
    with cut_by_hand(network(), [1, 3]) as pipe:
        x = torch.randn(7, 4).double().requires_grad_()
        with pytest.raises(RuntimeError, match=r"create_graph=True: a pipeline has no second derivatives"):
            torch.autograd.grad(pipe(x).pow(3).sum(), x, create_graph=True)
        loss = pipe(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_is_written_before_the_backward_is_noticed(recompute):
    model = network()
    with cut_by_hand(model, [1, 3], recompute=recompute) as pipe:
        x = torch.randn(7, 4).double()
        output = pipe(x)
        x.zero_()
        with pytest.raises(
            RuntimeError, match="the input of a pipeline was modified by an inplace operation"
        ):
            output.sum().backward()
        pipe(x).sum().backward()
        output = pipe(x)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_an_input_that_only_some_micro_batches_use_has_zeros_in_the_others():
    choose = Calls(lambda nest: nest["a"] * 2 if bool(nest["a"].detach().sum() > 0) else nest["b"] * 3)
    a, b = torch.tensor([[1.0], [-1.0]], requires_grad=True), torch.ones(2, 1, requires_grad=True)
    with cut_by_hand(nn.Sequential(choose, nn.Identity()), [1], micro_batches=2) as pipe:
        pipe({"a": a, "b": b}).sum().backward()
    zero_elsewhere = {"a": torch.tensor([[2.0], [0.0]]), "b": torch.tensor([[0.0], [3.0]])}
    plain.assert_same({"a": a.grad, "b": b.grad}, zero_elsewhere)
