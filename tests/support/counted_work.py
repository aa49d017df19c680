"""Blocks whose work is counted in place of time, so that profiles of them are the same each time."""

from typing import Any

import torch
from torch import Tensor, nn

from pipepart.profiling import timing
from tests.support.tally import called, calls, clock, worked

D = 16


class _Works(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        worked(seconds * x.numel())
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        worked(3 * ctx.seconds * gradients[0].numel())
        return gradients[0], None


class Block(nn.Module):
    """Works for ``seconds`` an element, forward, and three times as long backward. Counts its calls."""

    def __init__(self, seconds: float = 1.0, width: int = D) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        called(self)
        y = self.linear(x)
        return _Works.apply(y, self.seconds)


def counted_in_place_of_time(monkeypatch: Any) -> None:
    """Let profiles see the work of blocks as their seconds."""
    monkeypatch.setattr(timing, "time", clock)
    calls()
