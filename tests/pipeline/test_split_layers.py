"""Layers of every sort train under a split backward as they do in one, wherever the border falls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support import plain
from tests.support.chains import cut_by_hand


def check_every_border(model: nn.Sequential, x: Tensor, y: Tensor, loss_fn: Any = None) -> None:
    """Two stages, each border in turn: bit for bit the gradients and buffers of micro-batched training."""
    loss_fn = loss_fn or nn.MSELoss()
    reference = plain.twin(model)
    for _ in range(2):
        plain.micro_batched_step(reference, x.clone(), y, loss_fn, 4)
    for border in range(1, len(model)):
        ours = plain.twin(model)
        with cut_by_hand(ours, [border], loss_fn=loss_fn, micro_batches=4, schedule="zb-h1") as pipe:
            for _ in range(2):
                pipe.step(x.clone(), target=y)
        plain.assert_same(dense(plain.gradients(ours)), dense(plain.gradients(reference)))
        plain.assert_same(dict(ours.named_buffers()), dict(reference.named_buffers()))


def dense(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {
        name: gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        for name, gradient in gradients.items()
    }


class Shared(nn.Module):
    """One linear layer, used so many times, and once more by its weight alone if asked for."""

    def __init__(self, times: int, weight: bool = False) -> None:
        super().__init__()
        self.layer, self.times, self.weight = nn.Linear(6, 6), times, weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return x + functional.linear(x, self.layer.weight) if self.weight else x


class Chunked(nn.Module):
    """Three projections that are views of one weight, as in attention, put together from chunks of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(18, 6))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (functional.linear(x, part) for part in self.weight.chunk(3))
        left, right = (query * key).chunk(2, -1)
        return value + torch.cat([right, left], -1).view_as(value)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * 2 * x * weight, (gradients[0] * x * x).sum((0, 1))


class Custom(nn.Module):
    """A function with a backward of its own, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(Squared.apply(self.before(x), self.scale))


class InPlace(nn.Module):
    """Writes over what a linear layer has made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mul_(2).relu_()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.outer, self.reentrant = nn.Linear(6, 6), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class First(nn.Module):
    """The output of a recurrent layer without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU(inplace=True))


def frozen() -> nn.Module:
    return nn.Linear(6, 6).requires_grad_(False)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "convolution and batch norm": with_batch_norm,
    "depthwise convolution": lambda: nn.Conv1d(5, 5, 1, groups=5, bias=False),
    "attention": Attention,
    "transformer layer": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0, batch_first=True),
    "norm": lambda: nn.LayerNorm(6),
    "gru": lambda: First(nn.GRU(6, 6, batch_first=True)),
    "lstm": lambda: First(nn.LSTM(6, 3, bidirectional=True, batch_first=True)),
    "used twice": lambda: Shared(2),
    "used four times": lambda: Shared(3, weight=True),
    "chunks of a weight": Chunked,
    "custom function": Custom,
    "in place": InPlace,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "frozen": frozen,
    "no parameters": nn.Softplus,
    "bias frozen": lambda: _frozen_bias(nn.Linear(6, 6)),
    "identity": nn.Identity,
}


def _frozen_bias(layer: nn.Linear) -> nn.Linear:
    layer.bias.requires_grad_(False)
    return layer


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_among_others(kind):
    model = nn.Sequential(nn.Linear(6, 6), LAYERS[kind](), nn.Tanh(), LAYERS[kind](), nn.Linear(6, 2))
    check_every_border(model, torch.randn(9, 5, 6), torch.randn(9, 5, 2))


def test_a_layer_that_writes_into_its_input():
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    model = nn.Sequential(
        nn.Linear(6, 6), Double(), nn.Linear(6, 6), nn.LayerNorm(6), Double(), nn.Linear(6, 2)
    )
    check_every_border(model, torch.randn(9, 6), torch.randn(9, 2))


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding(sparse):
    model = nn.Sequential(nn.Embedding(7, 6, sparse=sparse), nn.Tanh(), nn.Linear(6, 2))
    check_every_border(model, torch.randint(7, (9, 5)), torch.randn(9, 5, 2))


def test_an_embedding_tied_to_a_head_in_its_stage():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False), nn.Linear(7, 2))
    model[2].weight = model[0].weight
    reference = plain.twin(model)
    x, y = torch.randint(7, (9, 5)), torch.randn(9, 5, 2)
    with cut_by_hand(model, [3], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("frozen", ["first stage", "second stage", "all", "ends", "but norms"])
def test_frozen_layers(frozen):
    model = nn.Sequential(
        nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)
    )
    places = {
        "first stage": (0, 1, 2),
        "second stage": (3, 4, 5),
        "all": range(6),
        "ends": (0, 5),
        "but norms": (0, 2, 3, 5),
    }[frozen]
    for place in places:
        model[place].requires_grad_(False)
    reference = plain.twin(model)
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    with cut_by_hand(model, [3], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1") as pipe:
        pipe.step(x, target=y)
    if frozen != "all":
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_hooks_fire_once_a_micro_batch_with_the_values_of_one_backward():
    """On parameters, on tensors and on modules, of layers of both stages."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    seen: dict[str, list[tuple[str, Tensor]]] = {}
    for schedule in ("1f1b", "zb-h1"):
        ours = plain.twin(model)
        calls = seen[schedule] = []
        hook_all_sorts(ours, calls)
        with cut_by_hand(ours, [3], loss_fn=nn.MSELoss(), micro_batches=4, schedule=schedule) as pipe:
            pipe.step(x, target=y)
    for name in {name for name, _ in seen["1f1b"]}:
        expected, found = ([g for n, g in seen[schedule] if n == name] for schedule in seen)
        assert len(found) == 4
        assert all(one.equal(other) for one, other in zip(expected, found, strict=True))
    assert {name for name, _ in seen["zb-h1"]} == {
        "parameter",
        "accumulated",
        "module",
        "tensor",
        "last tensor",
    }


def hook_all_sorts(model: nn.Module, calls: list[tuple[str, Tensor]]) -> None:
    def note(name: str) -> Callable[[Tensor], None]:
        return lambda tensor: calls.append((name, tensor.clone()))

    def note_output(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            output.register_hook(note(name))

        return hook

    model.get_parameter("1.weight").register_hook(note("parameter"))
    accumulated = model.get_parameter("2.bias")
    accumulated.register_post_accumulate_grad_hook(lambda p: note("accumulated")(p.grad))  # type: ignore[arg-type]
    model.get_submodule("4").register_full_backward_hook(lambda module, given, got: note("module")(got[0]))
    model.get_submodule("1").register_forward_hook(note_output("tensor"))
    model.get_submodule("5").register_forward_hook(note_output("last tensor"))
