"""Layers and losses with one fault each, which make a pipeline compute other numbers."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional


def chain(*middle: nn.Module) -> nn.Sequential:
    """Six layers at least, the given ones being those from ``"2"`` on, cut between ``"2"`` and ``"3"`` or behind."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    """Twelve samples with classes."""
    return torch.randn(12, 6), torch.randint(3, (12,))


def on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class OwnCount(nn.Module):
    """Counts its calls in an attribute, and its output depends on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * (1 + self.count % 3)


class SharedCount(nn.Module):
    """Counts the calls of all its copies."""

    count: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        SharedCount.count += 1
        return x * (1 + SharedCount.count % 97)


class OneInFlight(nn.Module):
    """Keeps what its backward needs in one place, where the next micro-batch writes over it."""

    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(x)


class _Square(torch.autograd.Function):
    kept: ClassVar[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Square.kept = x.detach()
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * _Square.kept * gradients[0]


class BackwardOfMainThread(nn.Module):
    """Has the right gradient on the main thread only."""

    def forward(self, x: Tensor) -> Tensor:
        return _Doubled.apply(x)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (2 if on_main_thread() else 3)


class ForwardOfMainThread(nn.Module):
    """Gives something else on a worker's thread."""

    def forward(self, x: Tensor) -> Tensor:
        return x if on_main_thread() else x + 1


class NumbersOfMainThread(nn.Module):
    """Gives NaN on a worker's thread."""

    def forward(self, x: Tensor) -> Tensor:
        return x if on_main_thread() else x * float("nan")


class BufferOfMainThread(nn.Module):
    """Counts in a buffer, on a worker's thread twice; its output is right."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1 if on_main_thread() else 2
        return x


class Uncopied(nn.Module):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return x


class OwnLoss(nn.Module):
    """The last layer of a model that computes its own loss: a sum, which nobody can see from outside."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


def mean(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples, which nobody can follow and which may be said to be something else."""
    return functional.cross_entropy(output, target).exp().log()


def root_mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Neither a mean nor a sum over samples."""
    return functional.cross_entropy(output, target).sqrt()
