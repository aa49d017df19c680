"""Layers and losses with one fault each, which make a pipeline compute other numbers."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipepart
from pipepart import CheckReport
from tests.support.in_backward import with_gradient
from tests.support.two_parts import Calls


def chain(*middle: nn.Module) -> nn.Sequential:
    """Six layers at least, the given ones being those from ``"2"`` on, cut between ``"2"`` and ``"3"`` or behind."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    """Twelve samples with classes."""
    return torch.randn(12, 6), torch.randint(3, (12,))


def checked(model: nn.Module, **options: Any) -> CheckReport:
    """Two steps in float64 on two devices, unless ``options`` of the check say otherwise."""
    x, y = batch()
    given: dict[str, Any] = {"sample": x, "target": y, "loss_fn": nn.CrossEntropyLoss(), "steps": 2}
    given["dtypes"] = ["float64"]
    return pipepart.check(model, **given | options)


def on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class OwnCount(nn.Module):
    """Counts its calls in an attribute, and its output depends on the count."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * (1 + self.count % 3)


_calls = itertools.count(1)


def shared_count() -> Calls:
    """Counts the calls of all its copies."""
    return Calls(lambda x: x * (1 + next(_calls) % 97))


def one_in_flight() -> Calls:
    """Keeps what its backward needs in one place, where the next micro-batch writes over it."""
    kept: dict[str, Tensor] = {}

    def square(x: Tensor) -> Tensor:
        kept["x"] = x.detach()
        return x * x

    return Calls(lambda x: with_gradient(x, lambda gradient: 2 * kept["x"] * gradient, square))


def backward_of_main_thread() -> Calls:
    """Has the right gradient on the main thread only."""
    return Calls(lambda x: with_gradient(x, lambda gradient: gradient * (1 if on_main_thread() else 2)))


def forward_of_main_thread(otherwise: float) -> Calls:
    """Adds this on a worker's thread."""
    return Calls(lambda x: x if on_main_thread() else x + otherwise)


def buffer_of_main_thread() -> Calls:
    """Counts in a buffer, on a worker's thread twice; its output is right."""
    return Calls(
        lambda x, seen: (seen.add_(1 if on_main_thread() else 2), x)[1], seen=nn.Buffer(torch.zeros(()))
    )


def uncopied() -> nn.Module:
    """Holds what cannot be copied."""
    layer = nn.Identity()
    layer.lock = threading.Lock()  # type: ignore[assignment]
    return layer


def mean(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples, which nobody can follow and which may be said to be something else."""
    return functional.cross_entropy(output, target).exp().log()


def root_mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Neither a mean nor a sum over samples."""
    return functional.cross_entropy(output, target).sqrt()
