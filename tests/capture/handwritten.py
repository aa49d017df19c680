"""A U-Net as people write it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _double(ins: int, outs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(ins, outs, 3, padding=1),
        nn.GroupNorm(2, outs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outs, outs, 3, padding=1),
    )


class UNet(nn.Module):
    """Skips from each level of the way down to the same level of the way up."""

    def __init__(self, channels: int = 4, levels: int = 3) -> None:
        super().__init__()
        sizes = [channels * 2**i for i in range(levels)]
        self.stem = nn.Conv2d(3, channels, 1)
        self.down = nn.ModuleList(
            [_double(a, b) for a, b in zip([channels, *sizes[:-1]], sizes, strict=True)]
        )
        self.pool = nn.MaxPool2d(2)
        self.middle = _double(sizes[-1], sizes[-1])
        self.up = nn.ModuleList([_double(2 * size, max(size // 2, channels)) for size in reversed(sizes)])
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        x = self.stem(x)
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)
