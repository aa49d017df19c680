"""Models whose layers share parameters or state."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipepart import Pipeline
from pipepart.capture import flatten
from tests.support.chains import apart, plan_by_hand


class Head(nn.Module):
    """Scores for each word, by the weight of the embedding."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Mixed(nn.Module):
    """Uses a shared weight twice, and one of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + (x @ self.weight.t()).tanh() @ self.weight


def language_model() -> nn.Sequential:
    """Embedding, two blocks of which one uses the embedding's weight, and a tied head."""
    embedding = nn.Embedding(9, 4)
    return nn.Sequential(
        embedding,
        nn.Linear(4, 4),
        Mixed(embedding.weight),
        nn.LayerNorm(4),
        nn.Tanh(),
        Head(embedding.weight),
    )


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def words(samples: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randint(9, (samples, 3)), torch.randint(9, (samples, 3))


def cut_apart(model: nn.Module, borders: Sequence[int], loss_fn: Any = loss_fn, **options: Any) -> Pipeline:
    """Return a pipeline with each stage on a torch device of its own, for three micro-batches."""
    names = [name for name, _ in flatten(model)]
    return Pipeline(model, apart(plan_by_hand(names, borders, micro_batches=3, **options)), loss_fn)


class Rotated(nn.Module):
    """Adds a table that other layers have, too."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.get_buffer("table")
