"""Models and mini-batches that several cases train."""

from __future__ import annotations

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


class Packs(nn.Module):
    """Returns tensors that share memory, others of odd layouts, and values that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        both = self.linear(x)
        left, right = both.chunk(2, dim=1)
        image = both.view(-1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
        return {
            "views": (left, [right.t(), None]),
            "image": image,
            "mask": x > 0,
            "scale": 2.0,
            "rows": torch.arange(len(x)),
            "none": x[:0],
            "one": x.sum(),
            "wide": x.detach()[:1].expand(len(x), -1),
        }


class Unpacks(nn.Module):
    def forward(self, nest: dict[str, Any]) -> Tensor:
        (left, (right, nothing)), image = nest["views"], nest["image"]
        assert nothing is None
        assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert not len(nest["none"])
        x = left * nest["mask"] * nest["scale"] + right.t().tanh() + nest["rows"][:, None] * nest["one"]
        return x + image.flatten(1)[:, :WIDTH] + nest["wide"]


class Forks(nn.Module):
    """Passes its input on beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.branch(x), x


class Joins(nn.Module):
    """Adds both, which therefore have one gradient."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]
