"""A model to train in several replicas, and its mini-batches."""

import torch
from torch import nn

from tests.support.plain import in_double

# The replicas that four micro-batches take where there are two.
IN_TURN = (0, 1, 0, 1)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, dtype=torch.double), torch.randn(samples, 4, dtype=torch.double)


def model_for(chunks: int) -> nn.Sequential:
    """Two layers for each stage, of two devices with ``chunks`` stages each."""
    layers = [nn.Linear(3, 4), nn.Tanh()]
    for _ in range(2 * chunks - 1):
        layers += [nn.Linear(4, 4), nn.GELU()]
    return in_double(layers)
