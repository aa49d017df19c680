"""Loss functions of more than a line, and batches of unusual shapes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.loss.batches import CLASSES, numbers

CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 0.0, 2.0], dtype=torch.double)
BUFFER = torch.ones(3, dtype=torch.double)
CENTERS = torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(2)).double()
TOTAL = torch.tensor(7.0, dtype=torch.double)
GLOBAL = {"scale": 0.5}
WEIGHTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.double)
PENALIZED = nn.Parameter(torch.rand(2, 3, generator=torch.Generator().manual_seed(3)).double())


def weighted() -> tuple[Tensor, Any]:
    o, t = numbers()
    return o, (t, torch.rand(6).double())


def square() -> tuple[Tensor, Tensor]:
    """Two samples a micro-batch of three, each with two numbers: extents that look alike."""
    return torch.randn(6, 2).double(), torch.randn(6, 2).double()


def wide() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8).double(), torch.randn(8, 8).double()


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, CLASSES, 4, 4).double(), torch.randint(-1, CLASSES, (6, 4, 4))


def in_place_labels(o: Tensor, t: Tensor) -> Tensor:
    t = t.clone()
    t[t == 0] = -100
    return F.cross_entropy(o, t)


def per_class(o: Tensor, t: Tensor) -> Tensor:
    total = o.sum() * 0
    for c in range(CLASSES):
        mask = t == c
        if mask.any():
            total = total + F.cross_entropy(o[mask], t[mask])
    return total


def heads(o: Tensor, t: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(o[:, i], t[:, i]) for i in range(3)]).mean()


def head_sum(o: Tensor, t: Tensor) -> Tensor:
    loss = torch.tensor(0.0, dtype=torch.double)
    for i in range(3):
        loss += (i + 1) * F.mse_loss(o[:, i], t[:, i])
    return loss / 3


def vae(o: Tensor, t: Tensor) -> Tensor:
    mean, log_variance = o[:, :1], o[:, 1:2]
    kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.mse_loss(o, t, reduction="sum") / o.size(0) + kl / o.size(0)


def by_position(o: Tensor, t: Tensor) -> Tensor:
    losses = [F.cross_entropy(o[:, i], t[:, i], reduction="sum") for i in range(5)]
    return sum(losses[1:], losses[0]) / (t != -100).sum()


def dice_over_images(o: Tensor, t: Tensor) -> Tensor:
    p = o.softmax(1)
    y = F.one_hot(t.clamp(min=0), num_classes=CLASSES).permute(0, 3, 1, 2).double()
    overlap, sizes = (p * y).sum((2, 3)), p.sum((2, 3)) + y.sum((2, 3))
    return 1 - (2 * overlap / sizes).mean()


def hard_negatives(o: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(o, t, reduction="none")
    return losses[losses > losses.mean()].mean()


def top(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t, reduction="none").topk(1).values.mean()


def first_half(o: Tensor, t: Tensor) -> Tensor:
    n = o.shape[0] // 2 or 1
    return F.mse_loss(o[:n], t[:n])


def coefficient_written(o: Tensor, t: Tensor) -> Tensor:
    factor = torch.ones((), dtype=torch.double)
    loss = F.mse_loss(o, t) * factor
    factor.mul_(5)
    return loss + F.l1_loss(o, t) * factor


def accumulated(o: Tensor, t: Tensor) -> Tensor:
    total = o.new_zeros(())
    total += F.mse_loss(o, t)
    total += 0.1 * o.abs().mean()
    return total


class Ema(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3, dtype=torch.double))

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * o.detach().mean(0))
        return F.mse_loss(o - self.mean, t)


class Learned(nn.Module):
    """Weights of two terms that are learned, which is no sum of terms times numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2, dtype=torch.double))

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        a, b = F.mse_loss(o, t), F.l1_loss(o, t)
        return (-self.logs[0]).exp() * a + (-self.logs[1]).exp() * b + self.logs.sum()


class Attentive(nn.Module):
    """Learned weights of numbers of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.double))

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return ((o - t).square() * self.weight.softmax(0)).sum(1).mean()
