"""The second part of a backward holds what it needs and no more, and may run later, in any thread."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart.autograd import graph_cut
from pipepart.autograd.split_backward import backward_inputs
from tests.support import plain
from tests.support.two_parts import inputs, splits, train


def test_stages_of_several_threads_do_not_meet():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)) for _ in range(8)]
    samples = [[torch.randn(7, 6, requires_grad=True) for _ in range(20)] for _ in models]
    with ThreadPoolExecutor(4) as pool:
        ours = list(
            pool.map(
                lambda pair: train(plain.twin(pair[0]), pair[1], True), zip(models, samples, strict=True)
            )
        )
    for model, own, outcome in zip(models, samples, ours, strict=True):
        fused = train(plain.twin(model), own, False)
        plain.assert_same(outcome.weights, fused.weights)
        plain.assert_same(outcome.inputs, fused.inputs)


def test_the_second_part_may_run_in_another_thread():
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    x = inputs(7, 6)[0]
    fused = plain.twin(model)
    fused(x).sum().backward()
    _, roots = graph_cut.cut(model(x))
    part = backward_inputs(roots, [torch.ones(7, 5)])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(part.accumulate).result()
    plain.assert_same(plain.gradients(model), plain.gradients(fused))


def test_an_output_without_a_gradient_takes_no_part():
    torch.manual_seed(0)
    x = inputs(7, 6)[0]
    first, second = nn.Linear(6, 5), nn.Linear(6, 4)
    _, roots = graph_cut.cut((first(x), second(x)))
    part = backward_inputs(roots, [None, torch.ones(7, 4)])
    part.accumulate()
    assert first.weight.grad is None
    assert second.bias.grad is not None
    assert second.bias.grad.equal(torch.full((4,), 7.0))


def test_a_graph_without_roots_has_no_backward():
    part = backward_inputs((), ())
    part.accumulate()
    assert len(part) == 0


@splits
def test_hooks_on_the_input_see_its_gradient_in_the_first_part():
    torch.manual_seed(0)
    x = inputs(7, 6)[0]
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    layer = nn.Linear(6, 5)
    _, roots = graph_cut.cut(layer(x))
    part = backward_inputs(roots, [torch.ones(7, 5)])
    (gradient,) = seen
    assert gradient.equal(torch.ones(7, 5) @ layer.weight.detach())
    assert x.grad is not None
    assert x.grad.equal(gradient)
    assert layer.weight.grad is None
    part.accumulate()
    assert len(seen) == 1
    assert layer.weight.grad is not None


@splits
def test_an_input_written_into_between_the_parts_is_an_error():
    held = torch.ones(7, 6)
    layer = nn.Linear(6, 5)
    _, roots = graph_cut.cut(layer(held))
    part = backward_inputs(roots, [torch.ones(7, 5)])
    held += 1
    with pytest.raises(RuntimeError, match="has been written into"):
        part.accumulate()


def test_an_input_written_into_before_the_backward_is_autograds_error():
    held = torch.ones(7, 6)
    _, roots = graph_cut.cut(nn.Linear(6, 5)(held))
    held += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_inputs(roots, [torch.ones(7, 5)])


@pytest.fixture
def no_collector():
    """What is to be freed is freed by its last reference, not when the collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Token:
    """Something to hold."""


class Marked(torch.autograd.Function):
    """The identity, with a node that lives as long as its token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 1, None


@splits
@pytest.mark.usefixtures("no_collector")
def test_only_what_the_second_part_needs_is_held_until_then():
    torch.manual_seed(0)
    held: dict[str, weakref.ref[Any]] = {}

    def watch(name: str, tensor: Tensor) -> Tensor:
        held[name] = weakref.ref(tensor.untyped_storage())
        return tensor

    def mark(name: str, tensor: Tensor) -> Tensor:
        token = Token()
        held[name] = weakref.ref(token)
        return Marked.apply(tensor, token)

    def alive() -> set[str]:
        return {name for name, reference in held.items() if reference() is not None}

    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    given = watch("first's input", torch.randn(7, 6))
    hidden = watch("last's input", mark("node between", watch("first's output", first(given)).exp()).sin())
    value = mark("node behind", watch("last's output", last(hidden)).sin())
    _, roots = graph_cut.cut(value)
    del given, hidden, value
    assert alive() == {*held} - {"first's output"}  # exp keeps what it gave, sin what it got

    gradients = [watch("gradient of the output", torch.randn(7, 6))]
    part = backward_inputs(roots, gradients)
    del roots, gradients
    assert alive() == {"first's input", "last's input"}
    assert first.weight.grad is None

    part.accumulate()
    assert alive() == set()
    assert first.weight.grad is not None


@pytest.mark.usefixtures("no_collector")
def test_a_failed_first_part_holds_nothing():
    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("no")

    torch.manual_seed(0)
    hidden = nn.Linear(6, 6)(torch.randn(7, 6))
    hidden.register_hook(fail)
    output = nn.Linear(6, 6)(hidden)
    held = weakref.ref(hidden.untyped_storage())
    _, roots = graph_cut.cut(output)
    del hidden, output
    with pytest.raises(ValueError, match="no"):
        backward_inputs(roots, [torch.ones(7, 6)])
    del roots
    assert held() is None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_the_graph_of_a_function_of_ones_own_lives_though_its_output_is_gone():
    x = torch.ones(3, requires_grad=True)
    message, roots = graph_cut.cut(Doubled.apply(x.exp()))
    assert message.grad_fn is None
    graph_cut.backward(roots, [torch.ones(3)])
    assert x.grad is not None
    assert x.grad.equal(2 * torch.ones(3).exp())
