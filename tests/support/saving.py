"""A network whose layers differ in what they save for their backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Wide(nn.Module):
    """Saves much more than its input and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def saving_network() -> nn.Sequential:
    """Twelve layers that save their input, their output, both, or much more than either."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (Wide(), nn.Linear(16, 16), nn.GELU())))
