"""Kinds of layers, each as a chain to be cut anywhere: input and output have ``WIDTH`` features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support import pieces
from tests.support.pieces import WIDTH, linear


class Double(nn.Module):
    """Writes over its input, and has no flag that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Shared(nn.Module):
    """One linear layer that is used several times, and once more by its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x).tanh()
        return x + functional.linear(x, self.layer.weight)


class Chunked(nn.Module):
    """Three projections that are views of one weight, as in attention, put together from chunks of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))

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
        return gradients[0] * 2 * x * weight, (gradients[0] * x * x).sum(0)


class Custom(nn.Module):
    """A function with a backward of its own, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = linear(), linear()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(Squared.apply(self.before(x), self.scale))


class Slope(nn.Module):
    """Differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.inner(x).tanh().sum(), x, create_graph=True)
        return found


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.Tanh(), linear())
        self.outer, self.reentrant = linear(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class Tokens(nn.Module):
    """Embeds what it takes for two tokens a sample."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.detach()[:, :2] > 0).long()).sum(dim=1) + x


class Sequences(nn.Module):
    """A linear layer of three dimensions, whose backward is another than that of two, with views around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.stack([x, x.sin()], dim=1)).mean(dim=1)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unsqueeze(1).expand(-1, 3, -1))[:, 1]


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unsqueeze(1).expand(-1, 2, -1))[0][:, -1]


class Images(nn.Module):
    """Convolutions in channels-last layout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 2, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 2, 1, 3).contiguous(memory_format=torch.channels_last)
        return self.inner(image).flatten(1)


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    """The layer with these parameters frozen, or all."""
    for name, parameter in layer.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return layer


@dataclass(frozen=True)
class Kind:
    """Layers that belong together; whether they draw, write statistics, or see more than their own sample."""

    make: Callable[[], list[nn.Module]]
    draws: bool = False
    writes: bool = False
    by_batch: bool = False
    sparse: bool = False
    tied: bool = False

    def chain(self) -> nn.Sequential:
        """Two of its kind among other layers: at least seven."""
        first, second = self.make(), self.make()
        model = nn.Sequential(
            linear(), *first, nn.Tanh(), linear(), *second, linear(), nn.Sigmoid(), linear()
        )
        if self.tied:
            model[-1].weight = model[0].weight
        return model


KINDS: dict[str, Kind] = {
    "linear": Kind(lambda: [linear()]),
    "no bias": Kind(lambda: [nn.Linear(WIDTH, WIDTH, bias=False)]),
    "no parameters": Kind(lambda: [nn.Softplus()]),
    "identity": Kind(lambda: [nn.Identity()]),
    "frozen": Kind(lambda: [frozen(linear())]),
    "bias frozen": Kind(lambda: [frozen(linear(), "bias")]),
    "tied to the last layer": Kind(lambda: [linear()], tied=True),
    "norm": Kind(lambda: [nn.LayerNorm(WIDTH), nn.GELU()]),
    "group norm": Kind(lambda: [nn.GroupNorm(2, WIDTH)]),
    "batch norm": Kind(lambda: [nn.BatchNorm1d(WIDTH)], writes=True),
    "cumulative batch norm": Kind(lambda: [nn.BatchNorm1d(WIDTH, momentum=None), linear()], writes=True),
    "relu in place": Kind(lambda: [linear(), nn.ReLU(inplace=True)]),
    "in place": Kind(lambda: [linear(), Double()]),
    "in place twice": Kind(lambda: [linear(), Double(), Double(), nn.Hardtanh(inplace=True)]),
    "nests": Kind(lambda: [pieces.Fork(), pieces.Middle(), pieces.Join()]),
    "branches": Kind(lambda: [pieces.Parallel()]),
    "ways by its input": Kind(lambda: [pieces.Branches()], by_batch=True),
    "other layout": Kind(lambda: [pieces.OtherLayout()]),
    "half detached": Kind(lambda: [pieces.HalfDetached()]),
    "nested": Kind(lambda: [nn.Sequential(linear(), nn.Sequential(nn.Tanh()), linear())]),
    "weight norm": Kind(lambda: [nn.utils.parametrizations.weight_norm(linear())]),
    "spectral norm": Kind(lambda: [nn.utils.parametrizations.spectral_norm(linear())], writes=True),
    "sequences": Kind(lambda: [Sequences()]),
    "used several times": Kind(lambda: [Shared()]),
    "chunks of a weight": Kind(lambda: [Chunked()]),
    "custom function": Kind(lambda: [Custom()]),
    "differentiates": Kind(lambda: [Slope()]),
    "checkpoint": Kind(lambda: [Checkpointed(reentrant=False)]),
    "reentrant checkpoint": Kind(lambda: [Checkpointed(reentrant=True)]),
    "embedding": Kind(lambda: [Tokens(sparse=False)]),
    "sparse embedding": Kind(lambda: [Tokens(sparse=True)], sparse=True),
    "attention": Kind(lambda: [pieces.Attention()]),
    "transformer": Kind(lambda: [Transformer()]),
    "gru": Kind(lambda: [pieces.Recurrent()]),
    "lstm": Kind(lambda: [Lstm()]),
    "convolution": Kind(lambda: [pieces.Convolution()]),
    "images": Kind(lambda: [Images()]),
    "dropout": Kind(lambda: [linear(), nn.Dropout(0.4)], draws=True),
    "dropout in place": Kind(lambda: [linear(), nn.Dropout(0.3, inplace=True)], draws=True),
    "noise": Kind(lambda: [pieces.Noise()], draws=True),
    "attention with dropout": Kind(lambda: [pieces.Attention(dropout=0.3)], draws=True),
}
