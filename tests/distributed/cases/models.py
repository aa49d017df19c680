"""Models and mini-batches that several cases train."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.training import drawn_batches
from tests.support.pieces import WIDTH, linear

CLASSES = 5


def classifier() -> nn.Sequential:
    layers = [linear(), nn.Tanh(), linear(), nn.LayerNorm(WIDTH), linear(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers).double()


def labelled(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Samples of which many are ignored, in the first mini-batch all of one micro-batch."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for x, _ in drawn_batches(sizes):
        y = torch.randint(CLASSES, (len(x),), generator=generator)
        y[torch.rand(len(x), generator=generator) < 0.4] = -100
        found.append((x, y))
    found[0][1][:3] = -100
    return found


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def by_output(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """What the sum is divided by depends on the output, so that it is known last."""
    return functional.cross_entropy(output, target, reduction="sum"), (output.detach() > 0).sum()


LOSSES: dict[str, Any] = {
    "ignored": nn.CrossEntropyLoss(),
    "sum and count": sum_and_count,
    "known last": by_output,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.linspace(0.5, 2, CLASSES).double()),
}


class Overflow(nn.Module):
    """Has gradients that overflow in the steps in which ``on`` is set."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        if self.on and x.requires_grad:
            x.register_hook(lambda gradient: gradient * float("inf"))
        return x * 1


class Positions(nn.Linear):
    """Adds a table that is not saved, and scales by a tensor that is an attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0, 1, 4).cos() * torch.rand(4), persistent=False)
        self.scale = torch.rand(4)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale + self.table


def varied() -> nn.Sequential:
    """Layers of many sorts, to be made and not to be run."""
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        Positions(),
        nn.LSTM(4, 4, num_layers=2),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        Positions(),
    )
    return model.to(torch.float64)


class Blocks(nn.Module):
    """Calls its blocks one after the other."""

    block: Callable[[int, int], nn.Module] = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(4, 4) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class AsksForMask(Blocks):
    """Takes another way if its argument has zeros."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        x = x * 2 if bool(mask.all()) else x * mask.unsqueeze(1)
        return super().forward(x)


class AsksBetween(Blocks):
    """Reads what a block has computed."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else -block(x)
        return x


class AsksWhatItWrote(Blocks):
    """Reads a tensor of its own, into which it has written what a block computed."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        total = torch.zeros(1)
        for block in self.blocks:
            x = block(x)
            total += x.sum()
        return x * 2 if total > 0 else x


class Sorting(nn.Linear):
    """Computes only the positive samples: how many these are is known from values only."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.sum(1).gt(0).nonzero()[:, 0]
        return input.index_add(0, rows, super().forward(input[rows]))


class ReadsWithin(Blocks):
    block = Sorting


class Scaled(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = torch.rand(4)


class ScalesByFirst(Blocks):
    """Uses a tensor of its first block, which is no buffer, behind the last one."""

    block = Scaled

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        first: Any = self.blocks[0]
        return super().forward(x) * first.scale


class Alternating(Blocks):
    """Changes its way from forward to forward, by a counter that is out of sight."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) * (2 + next(_TURNS) % 2)


_TURNS = itertools.count()  # whose position no snapshot reads
