"""A backward in two parts has the numbers of one, and holds what it needs; autograd does what cannot wait."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from pipepart.autograd import graph_cut
from pipepart.autograd.split_backward import WeightGradients, backward_inputs
from tests.pipeline.conformance.layers import checkpointed
from tests.support import plain
from tests.support.in_backward import with_gradient
from tests.support.two_parts import SPLITS, Calls, splits


class Outcome(NamedTuple):
    """Gradients after two micro-batches, and the number of deferred uses of weights."""

    inputs: dict[str, Tensor | None]
    weights: dict[str, Tensor | None]
    waited: int


def train(
    model: nn.Module, samples: list[Tensor], split: bool, context: Callable[[], Any] = nullcontext
) -> Outcome:
    """Forward and backward of each sample with made-up gradients of the output; all second parts at the end."""
    generator = torch.Generator().manual_seed(1)
    leaves = [sample.detach().requires_grad_(sample.requires_grad) for sample in samples]
    waiting: list[WeightGradients] = []
    for leaf in leaves:
        with context():
            message, roots = graph_cut.cut(model(leaf))
        gradients = [
            torch.randn(part.shape, generator=generator).to(part) for part in graph_cut.leaves(message)
        ]
        if split:
            waiting.append(backward_inputs(roots, gradients))
        else:
            graph_cut.backward(roots, gradients)
    waited = sum(len(part) for part in waiting)
    for part in waiting:
        part.accumulate()
    return Outcome(
        {str(index): leaf.grad for index, leaf in enumerate(leaves)}, plain.gradients(model), waited
    )


def inputs(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for _ in range(2)]


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, groups=2)
    )


KNOWN_LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...], int]] = [
    (lambda: nn.Linear(6, 5), (7, 6), 1),
    (lambda: nn.Linear(6, 5, bias=False), (2, 7, 6), 1),
    (lambda: nn.Conv1d(6, 5, 3), (2, 6, 9), 1),
    (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1, groups=2), (2, 6, 9, 9), 1),
    (lambda: nn.ConvTranspose2d(6, 5, 3), (2, 6, 5, 5), 1),
    (conv_net, (2, 3, 8, 8), 2),
    (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 4)), (7, 6), 2),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), (3, 5, 8), 4),
]


# Of views of a weight, which wait, and of what is made of it, which does not.
FUNCTIONS: list[tuple[Callable[[Tensor, Tensor], Tensor], int]] = [
    (lambda x, a: F.linear(F.linear(x, a[:6]), a[6:]), 0),
    (lambda x, a: F.linear(x, a.to(torch.float64).to(torch.float32)), 1),
    (lambda x, a: F.linear(x, a) * a.sum(), 0),
    (lambda x, a: F.linear(x, a, x.mean() * torch.ones(12)), 1),
    (lambda x, a: F.linear(x, (b := a.t().t())) + b.sum(1), 0),
    (lambda x, a: torch.addmm(x, x, a[:6], alpha=2), 0),
    (lambda x, a: torch.addmm(x, x, a[:6]), 1),
    (lambda x, a: a[:6] @ a[6:], 0),
    (lambda x, a: torch.einsum("bi,oi->bo", x, a), 0),
    (lambda x, a: x @ a[:6].t() + x, 1),
]


def two_layers(wrap: Callable[..., nn.Module] = lambda layer: layer) -> nn.Sequential:
    return nn.Sequential(wrap(nn.Linear(6, 9)), nn.Tanh(), nn.Linear(9, 4))


def recurrent() -> nn.Module:
    """Uses weights of the state in each of four steps, and those of the input once."""
    return Calls(lambda x, before, layer: layer(before(x))[0], before=nn.Linear(6, 6), layer=nn.LSTM(6, 6))


def cross() -> nn.Module:
    inner = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
    return Calls(lambda x, inner: inner(x, x[..., :6], x[..., :6])[0], inner=inner)


def tied_to_the_head() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10))
    model[2].weight = model[0].weight
    return model


def frozen(*names: str) -> nn.Module:
    model = two_layers()
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def written_into(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = F.linear(x, a, c)
    y[:, 0] += 1
    y.sigmoid_()
    return F.linear(x, b) * y + x


def with_tensor_hooks(x: Tensor, a: Tensor) -> Tensor:
    y = F.linear(x, a)
    y.register_hook(lambda gradient: gradient * 3)
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] + 1,))  # type: ignore[union-attr]
    return y.tanh()


def with_a_penalty(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = F.linear(F.linear(x, a).tanh(), b)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope.square().sum()


def several_functions(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addmm(c, F.linear(x, a).tanh(), b.t()) @ a


def words() -> list[Tensor]:
    return [torch.randint(10, (3, 6)) for _ in range(2)]


def per_sample(x: Tensor, a: Tensor) -> Tensor:
    slopes = torch.vmap(lambda row: torch.func.grad(lambda r: F.linear(r, a).tanh().sum())(row))(x)
    return torch.vmap(lambda row: F.linear(row, a))(slopes + x)


class Case(NamedTuple):
    """A model, its samples or their shape, the uses of weights that wait, and where the forward runs."""

    model: Callable[[], nn.Module]
    samples: Callable[[], list[Tensor]] | tuple[int, ...]
    waits: int
    context: Callable[[], Any] = nullcontext


NORMED = lambda: nn.Sequential(  # noqa: E731
    nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4, bias=False)
)
CASES: dict[str, Case] = {
    **{f"known layer {index}": Case(*case) for index, case in enumerate(KNOWN_LAYERS)},
    **{
        f"function {index}": Case(
            lambda function=function: Calls(function, a=torch.randn(12, 6)), (7, 6), waits
        )
        for index, (function, waits) in enumerate(FUNCTIONS)
    },
    "embedding": Case(lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)), words, 1),
    "embedding tied to the head": Case(tied_to_the_head, words, 1),
    "input that asks for no gradient": Case(two_layers, lambda: inputs(7, 6, grad=False), 2),
    "functions that a layer calls": Case(
        lambda: Calls(several_functions, a=torch.randn(9, 6), b=torch.randn(9, 9), c=torch.randn(1, 9)),
        (7, 6),
        1,
    ),
    "frozen weight": Case(lambda: frozen("0.weight"), (7, 6), 1),
    "frozen layer": Case(lambda: frozen("2.weight", "2.bias"), (7, 6), 1),
    "layer used twice": Case(
        lambda: Calls(lambda x, layer: layer(layer(x).tanh()), layer=nn.Linear(6, 6)), (7, 6), 0
    ),
    "weight norm": Case(lambda: two_layers(wrap=parametrizations.weight_norm), (7, 6), 1),
    "autocast to bfloat16": Case(NORMED, (2, 6, 6), 3, lambda: torch.autocast("cpu", torch.bfloat16)),
    "lstm": Case(recurrent, (4, 3, 6), 1),
    "attention with keys of another width": Case(cross, (2, 5, 8), 4),
    "input used twice, output written into": Case(
        lambda: Calls(written_into, a=torch.randn(6, 6), b=torch.randn(6, 6), c=torch.randn(6)), (7, 6), 2
    ),
    "hooks of tensors": Case(lambda: Calls(with_tensor_hooks, a=torch.randn(6, 6)), (7, 6), 1),
    "checkpoint": Case(lambda: checkpointed(reentrant=False), (7, 6), 1),
    "reentrant checkpoint": Case(lambda: checkpointed(reentrant=True), (7, 6), 0),
    "tensors saved through hooks": Case(two_layers, (7, 6), 0, torch.autograd.graph.save_on_cpu),
    "gradient penalty": Case(
        lambda: Calls(with_a_penalty, a=torch.randn(9, 6), b=torch.randn(6, 9)), (7, 6), 0
    ),
    "function transforms": Case(lambda: Calls(per_sample, a=torch.randn(9, 6)), (7, 6), 0),
    "complex weights": Case(
        lambda: nn.Linear(6, 5, dtype=torch.complex64), lambda: inputs(7, 6, dtype=torch.complex64), 0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_waits_and_what_does_not_has_the_same_bits(name: str):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    samples = inputs(*case.samples) if isinstance(case.samples, tuple) else case.samples()
    fused, ours = (train(plain.twin(model), samples, split, case.context) for split in (False, True))
    plain.assert_same(ours.inputs, fused.inputs)
    plain.assert_same(ours.weights, fused.weights)
    assert any(gradient is not None for gradient in fused.weights.values())
    assert ours.waited == (case.waits * len(samples) if SPLITS else 0)


@splits
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_a_hook_does_not_wait(kind: str):
    model = two_layers()
    getattr(model[2].weight, kind)(lambda _: None)
    assert train(model, inputs(7, 6), True).waited == 2  # of the other layer, in two micro-batches


def test_hooks_that_wait_for_several_gradients_are_called():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    calls = []
    torch.autograd.graph.register_multi_grad_hook(
        tuple(model.parameters()), lambda got: calls.append(len(got))
    )
    train(model, inputs(7, 6), True)
    assert calls == [4, 4]


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


@pytest.fixture
def no_collector():
    """What is to be freed is freed by its last reference, not when the collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Token:
    """Something to hold."""


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
        return with_gradient(tensor, lambda gradient, token=token: gradient * 1)  # a node that holds it

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


def test_the_graph_of_a_function_of_ones_own_lives_though_its_output_is_gone():
    x = torch.ones(3, requires_grad=True)
    message, roots = graph_cut.cut(with_gradient(x.exp(), lambda gradient: gradient * 2, lambda y: y * 2))
    assert message.grad_fn is None
    graph_cut.backward(roots, [torch.ones(3)])
    assert x.grad is not None
    assert x.grad.equal(2 * torch.ones(3).exp())
