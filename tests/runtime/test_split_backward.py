"""A backward in two parts has the numbers of one in one part, and leaves to autograd what it cannot put off."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support import plain
from tests.support.two_parts import SPLITS, Calls, assert_same_as_fused, inputs, train


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, groups=2)
    )


KNOWN_LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...], int]] = [
    (lambda: nn.Linear(6, 5), (7, 6), 1),
    (lambda: nn.Linear(6, 5, bias=False), (7, 6), 1),
    (lambda: nn.Linear(6, 5), (2, 7, 6), 1),
    (lambda: nn.Linear(6, 5, bias=False), (2, 7, 6), 1),
    (lambda: nn.Conv1d(6, 5, 3), (2, 6, 9), 1),
    (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1, groups=2), (2, 6, 9, 9), 1),
    (lambda: nn.ConvTranspose2d(6, 5, 3), (2, 6, 5, 5), 1),
    (conv_net, (2, 3, 8, 8), 2),
    (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 4)), (7, 6), 2),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), (3, 5, 8), 4),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0), (5, 3, 8), 4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("layer", "shape", "waits"), KNOWN_LAYERS)
def test_known_layers_wait_and_have_the_same_bits(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], waits: int, dtype: torch.dtype
):
    torch.manual_seed(0)
    assert_same_as_fused(layer().to(dtype), inputs(*shape, dtype=dtype), waits)


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (lambda x, a: F.linear(F.linear(x, a[:6]), a[6:]), 0),
        (lambda x, a: torch.cat([F.linear(x, part) for part in a.split([4, 8])], -1), 0),
        (lambda x, a: F.conv1d(x.unsqueeze(-1), a.unsqueeze(-1)), 1),
        (lambda x, a: F.linear(x, a.to(torch.float64).to(torch.float32)), 1),
        (lambda x, a: F.linear(x, a * 2), 0),
        (lambda x, a: F.linear(x, a) * a.sum(), 0),
        (lambda x, a: F.linear(x, a, x.mean() * torch.ones(12)), 1),
        (lambda x, a: F.linear(x, (b := a.t().t())) + b.sum(1), 0),
        (lambda x, a: torch.addmm(x, x, a[:6], alpha=2), 0),
        (lambda x, a: torch.addmm(x, x, a[:6]), 1),
        (lambda x, a: a[:6] @ a[6:], 0),
        (lambda x, a: torch.einsum("bi,oi->bo", x, a), 0),
        (lambda x, a: x @ a[:6].t() + x, 1),
    ],
)
def test_views_of_weights_wait_and_what_is_made_of_them_does_not(function: Callable[..., Tensor], waits: int):
    torch.manual_seed(0)
    assert_same_as_fused(Calls(function, a=torch.randn(12, 6)), inputs(7, 6), waits)


def two_layers(middle: Callable[[], nn.Module] = nn.Tanh, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9, **options), middle(), nn.Linear(9, 4, **options))


class TiedTwice(nn.Module):
    """One layer used twice, its weight used a third time, by itself, if asked for."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(x).tanh())
        for _ in range(self.more):
            x = F.linear(x.tanh(), self.layer.weight)
        return x


class Casts(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(input).float()


class Around(nn.Module):
    """A linear layer before one of another kind."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(6, 6), layer(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return self.layer(y, y) if isinstance(self.layer, nn.Bilinear) else self.layer(y)[0]


class Cross(nn.Module):
    """Attention whose keys are of the same width, or of another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=width, vdim=width, batch_first=True)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        key = x[..., : self.width] if self.width < 8 else x * 2
        return self.attention(x, key, key)[0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.outer = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def tied_to_the_head() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10))
    model[2].weight = model[0].weight
    return model


def frozen(*names: str) -> nn.Module:
    model = two_layers()
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def with_a_module_hook() -> nn.Module:
    model = two_layers()
    model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))
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


def autocast(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype)


class Case(NamedTuple):
    """A model, its samples or their shape, the uses of weights that wait, and where the forward runs."""

    model: Callable[[], nn.Module]
    samples: Callable[[], list[Tensor]] | tuple[int, ...]
    waits: int
    context: Callable[[], Any] = nullcontext


def embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(10, 4, **options), nn.Linear(4, 3))


def parametrized(parametrize: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(parametrize(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 4))


NORMED = lambda: nn.Sequential(  # noqa: E731
    nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4, bias=False)
)
CASES: dict[str, Case] = {
    "embedding": Case(embedding(), words, 1),
    "embedding of limited norm": Case(embedding(max_norm=1.0), words, 1),
    "embedding tied to the head": Case(tied_to_the_head, words, 1),
    "input that asks for no gradient": Case(two_layers, lambda: inputs(7, 6, grad=False), 2),
    "functions that a layer calls": Case(
        lambda: Calls(several_functions, a=torch.randn(9, 6), b=torch.randn(9, 9), c=torch.randn(1, 9)),
        (7, 6),
        1,
    ),
    "frozen weight": Case(lambda: frozen("0.weight"), (7, 6), 1),
    "frozen bias": Case(lambda: frozen("0.bias"), (7, 6), 2),
    "frozen layer": Case(lambda: frozen("2.weight", "2.bias"), (7, 6), 1),
    "bias alone": Case(lambda: frozen("0.weight", "2.bias"), (7, 6), 1),
    "layer used twice": Case(lambda: TiedTwice(0), (7, 6), 0),
    "weight used five times": Case(lambda: TiedTwice(3), (7, 6), 0),
    "weight norm": Case(parametrized(parametrizations.weight_norm), (7, 6), 1),
    "autocast to bfloat16": Case(NORMED, (2, 6, 6), 3, autocast(torch.bfloat16)),
    "autocast, used twice": Case(lambda: TiedTwice(0), (2, 6, 6), 0, autocast(torch.bfloat16)),
    "autocast of convolutions": Case(
        lambda: nn.Sequential(nn.Conv1d(6, 5, 3), nn.Conv1d(5, 2, 3)), (2, 6, 6), 2, autocast(torch.bfloat16)
    ),
    "autocast of each layer": Case(lambda: nn.Sequential(Casts(6, 9), nn.Tanh(), Casts(9, 4)), (7, 6), 2),
    # Weights of the state are used in each of the four steps, those of the input once.
    "lstm": Case(lambda: Around(nn.LSTM), (4, 3, 6), 1),
    "bilinear": Case(lambda: Around(lambda *widths: nn.Bilinear(6, *widths)), (4, 3, 6), 1),
    "attention with keys of another width": Case(lambda: Cross(6), (2, 5, 8), 4),
    "attention with keys of its own": Case(lambda: Cross(8), (2, 5, 8), 1),
    "input used twice, output written into": Case(
        lambda: Calls(written_into, a=torch.randn(6, 6), b=torch.randn(6, 6), c=torch.randn(6)), (7, 6), 2
    ),
    "hooks of tensors": Case(lambda: Calls(with_tensor_hooks, a=torch.randn(6, 6)), (7, 6), 1),
    "hooks of modules": Case(with_a_module_hook, (7, 6), 2),
    "checkpoint": Case(lambda: Checkpointed(False), (7, 6), 1),
    "reentrant checkpoint": Case(lambda: Checkpointed(True), (7, 6), 0),
    "tensors saved through hooks": Case(two_layers, (7, 6), 0, torch.autograd.graph.save_on_cpu),
    "gradient penalty": Case(
        lambda: Calls(with_a_penalty, a=torch.randn(9, 6), b=torch.randn(6, 9)), (7, 6), 0
    ),
    "complex weights": Case(
        lambda: nn.Linear(6, 5, dtype=torch.complex64), lambda: inputs(7, 6, dtype=torch.complex64), 0
    ),
    "no known layers": Case(lambda: nn.Sequential(nn.LayerNorm(6), nn.PReLU()), (7, 6), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_waits_and_what_does_not_has_the_same_bits(name: str):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    samples = inputs(*case.samples) if isinstance(case.samples, tuple) else case.samples()
    assert_same_as_fused(model, samples, case.waits, case.context)


def test_a_sparse_gradient_stays_sparse():
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    samples = [torch.randint(10, (3, 6)) for _ in range(2)]
    fused, ours = (train(plain.twin(model), samples, split) for split in (False, True))
    theirs, found = fused.weights["weight"], ours.weights["weight"]
    assert theirs is not None
    assert found is not None
    assert found.is_sparse
    assert found.to_dense().equal(theirs.to_dense())
    assert ours.waited == 0


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameters_hook_is_called_once_a_backward_with_the_whole_gradient(kind: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    samples = inputs(7, 6)
    seen: dict[bool, list[Tensor]] = {False: [], True: []}
    outcomes = {}
    for split, calls in seen.items():
        copy = plain.twin(model)
        hook = getattr(copy.get_parameter("2.weight"), kind)
        hook(
            lambda tensor, calls=calls: calls.append((tensor if tensor.grad is None else tensor.grad).clone())
        )
        outcomes[split] = train(copy, samples, split)
    plain.assert_same(outcomes[True].weights, outcomes[False].weights)
    assert len(seen[True]) == 2
    assert all(found.equal(expected) for found, expected in zip(seen[True], seen[False], strict=True))
    assert outcomes[True].waited == (2 if SPLITS else 0)  # the layer without a hook


def test_hooks_that_wait_for_several_gradients_are_called():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    calls = []
    torch.autograd.graph.register_multi_grad_hook(
        tuple(model.parameters()), lambda got: calls.append(len(got))
    )
    train(model, inputs(7, 6), True)
    assert calls == [4, 4]


def test_function_transforms_inside():
    def layer(x: Tensor, a: Tensor) -> Tensor:
        per_sample = torch.vmap(lambda row: torch.func.grad(lambda r: F.linear(r, a).tanh().sum())(row))(x)
        return torch.vmap(lambda row: F.linear(row, a))(per_sample + x)

    torch.manual_seed(0)
    model = Calls(layer, a=torch.randn(9, 6))
    fused, ours = (train(plain.twin(model), inputs(7, 6), split) for split in (False, True))
    plain.assert_same(ours.weights, fused.weights)
    plain.assert_same(ours.inputs, fused.inputs)
