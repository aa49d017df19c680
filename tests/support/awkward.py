# pyright: basic, reportArgumentType=false
"""The parts of small models that break tracers, and what is expected of their pipelines: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

D = 6


def blocks(count: int = 3, kind: Callable[[int, int], nn.Module] = nn.Linear) -> nn.ModuleList:
    """Return some layers."""
    return nn.ModuleList([kind(D, D) for _ in range(count)])


class Base(nn.Module):
    """Three blocks, a way to go through them, and what is done before and after."""

    Block: Callable[[int, int], nn.Module] = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(kind=self.Block)
        self.make()

    def make(self) -> None:
        pass

    def before(self, x: Tensor) -> Any:
        pass

    def forward(self, x: Tensor) -> Any:
        self.before(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.after(x)

    def after(self, x: Tensor) -> Any:
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
        assert kind.__name__ not in REFUSED
        REFUSED[kind.__name__] = kind, message
        return kind

    return keep


def refused_if(name: str, message: str, kind: type[nn.Module] = Base, **methods: Any) -> None:
    """Models of a kind are refused with these methods in place of their own."""
    refused(message)(type(name, (kind,), methods))
