"""Blocks whose work is counted in place of time, so that profiles of them are the same each time."""

from collections import Counter
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipepart.profiling import timing

D = 16

_Item = TypeVar("_Item")
_work: SimpleQueue[float] = SimpleQueue()
_calls: SimpleQueue[nn.Module] = SimpleQueue()


class Clock:
    """In place of the host's clock: shows the work that layers have done, and nothing else."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def perf_counter(self) -> float:
        self._seconds += sum(_drained(_work))
        return self._seconds


clock = Clock()


def called(block: nn.Module) -> None:
    """Count one call."""
    _calls.put(block)


def worked(seconds: float) -> None:
    """Let the clock go on."""
    _work.put(seconds)


def calls() -> Counter[nn.Module]:
    """Return the number of calls of each block since this was asked before."""
    return Counter(_drained(_calls))


def _drained(queue: SimpleQueue[_Item]) -> list[_Item]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


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
