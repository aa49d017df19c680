# pyright: basic, reportArgumentType=false
"""The parts of small models that break tracers, and what is expected of their pipelines: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

D = 6


def blocks(count: int = 3) -> nn.ModuleList:
    """Return some linear layers."""
    return nn.ModuleList([nn.Linear(D, D) for _ in range(count)])


class Base(nn.Module):
    """Three blocks and a way to go through them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.make()

    def make(self) -> None:
        pass

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


RIGHT: dict[str, Callable[[], nn.Module]] = {}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {}
_Kind = Callable[[type[nn.Module]], type[nn.Module]]


def right(kind: type[nn.Module]) -> type[nn.Module]:
    """Its gradients are those of the plain model."""
    RIGHT[kind.__name__] = kind
    return kind


def refused(message: str) -> _Kind:
    """It is refused with this message."""

    def keep(kind: type[nn.Module]) -> type[nn.Module]:
        REFUSED[kind.__name__] = kind, message
        return kind

    return keep
