"""A model whose layers exchange different kinds of values at each border."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipepart import add_loss


class Fork(nn.Module):
    """A message of several tensors, one of which needs no gradient."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"both": (x, x.tanh()), "size": torch.arange(4, device=x.device), "name": "fork"}


class Join(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        first, second = given["both"]
        return first + second * given["size"]


class Balanced(nn.Module):
    """Adds a loss of its own in the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        add_loss(self.linear.weight.square().sum() * 0.1 + x.mean())
        return self.linear(x)


def mixed() -> nn.Sequential:
    """Eight layers; the border between each two is of another kind."""
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.Sequential(nn.Dropout(0.3), Fork()),
        Join(),
        nn.BatchNorm1d(4),
        nn.ReLU(inplace=True),
        Balanced(),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)),
        nn.Linear(4, 4),
    )
