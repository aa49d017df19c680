"""Random mini-batches of six samples, outputs and targets."""

from typing import Any

import torch
from torch import Tensor

CLASSES = 4


def tokens() -> tuple[Tensor, Tensor]:
    """Logits and targets of sequences with unlike numbers of padded tokens; the first and last have nothing else."""
    y = torch.randint(CLASSES, (6, 5))
    y[0] = y[1, 2:] = y[5] = -100
    return torch.randn(6, 5, CLASSES).double(), y


def classes() -> tuple[Tensor, Tensor]:
    return torch.randn(6, CLASSES).double(), torch.randint(CLASSES, (6,))


def numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3).double(), torch.randn(6, 3).double()


def weighted() -> tuple[Tensor, Any]:
    """Numbers, and a weight of each sample beside their targets."""
    o, t = numbers()
    return o, (t, torch.rand(6).double())


def square() -> tuple[Tensor, Tensor]:
    """Two samples a micro-batch of three, each with two numbers: extents that look alike."""
    return torch.randn(6, 2).double(), torch.randn(6, 2).double()


def wide() -> tuple[Tensor, Tensor]:
    """Eight samples of eight numbers."""
    return torch.randn(8, 8).double(), torch.randn(8, 8).double()


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, CLASSES, 4, 4).double(), torch.randint(-1, CLASSES, (6, 4, 4))
