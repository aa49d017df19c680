"""Random mini-batches of six samples, outputs and targets."""

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
