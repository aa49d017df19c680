"""Layers of every sort with ``WIDTH`` inputs and outputs per sample, to build random chains from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pipepart

WIDTH = 6


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(1).expand(-1, 3, -1)
        return self.inner(tokens, tokens, tokens, need_weights=False)[0].mean(dim=1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unsqueeze(1).expand(-1, 2, -1))[0][:, -1]


class Noise(nn.Module):
    """Draws through an operation that takes no generator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Fails(nn.Module):
    """Fails at its third call, with work queued before it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("third call")
        return x * 1


class Balanced(nn.Module):
    """Adds two losses: a mean over samples of its gates, and a sum over samples of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = linear(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        pipepart.add_loss(0.3 * self.gate(x).softmax(dim=1).pow(2).sum(dim=1).mean())
        y = self.linear(x)
        pipepart.add_loss(0.01 * y.pow(2).sum(), reduction="sum")
        return y


class First(nn.Module):
    def forward(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0]
