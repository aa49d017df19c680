"""Models whose layers share parameters or state, and a check of their training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipepart import Pipeline
from pipepart.capture import flatten
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand


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
    """A pipeline with each stage on a torch device of its own, for three micro-batches.

    Torch takes ``cpu:1`` for another device than ``cpu`` and copies what moves there: no accelerator is needed.
    """
    plan = plan_by_hand([name for name, _ in flatten(model)], borders, micro_batches=3, **options)
    devices = tuple(
        device.model_copy(update={"torch_device": f"cpu:{index}"})
        for index, device in enumerate(plan.cluster.devices)
    )
    cluster = plan.cluster.model_copy(update={"devices": devices})
    return Pipeline(model, plan.model_copy(update={"cluster": cluster}), loss_fn)


def check(model: nn.Module, borders: list[int], x: Any, y: Any, loss: Any = loss_fn, **options: Any) -> None:
    """Two steps: bit for bit the gradients of plain micro-batched training."""
    reference = plain.twin(model)
    with cut_by_hand(model, borders, loss_fn=loss, **options) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, loss, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


class Rotated(nn.Module):
    """Adds a table that other layers have, too."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.get_buffer("table")


def new_values(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
