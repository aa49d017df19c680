"""Models whose values skip layers, and pipelines of them in which the stages between relay these values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 6


class Block(nn.Module):
    """A linear layer and its activation."""

    def __init__(self, ins: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(ins, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Hourglass(nn.Module):
    """As many layers down as up; each one up takes the output of its mate down, the last one the first one's."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(depth))
        self.up = nn.ModuleList(Block(2 * WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            kept.append(x := block(x))
        for block in self.up:
            x = block(torch.cat([x, kept.pop()], dim=-1))
        return x


class Woven(nn.Module):
    """A mask that two distant layers use, and values with up to five users."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(9))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        values = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            values.append(x)
            if index in (3, 5, 7):
                x = x + values[0] * index
            if index == 6:
                x = x * values[1] + values[0].sin() + values[1]
            if index in (2, 8):
                x = x.masked_fill(mask > 1, 0.5)
        return x
