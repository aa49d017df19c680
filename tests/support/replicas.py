"""Pipelines that train several replicas of a model, cut by hand, and the oracle that sums as they do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.plain import in_double

# The replicas that four micro-batches take where there are two.
IN_TURN = (0, 1, 0, 1)


def cut_replicas(
    model: nn.Module, borders: Sequence[int], replicas: int, *, micro_batches: int = 4, **how: Any
) -> Pipeline:
    """The model as a pipeline of ``replicas`` replicas; ``how`` as for :func:`tests.support.chains.cut_by_hand`."""
    return cut_by_hand(model, borders, replicas=replicas, micro_batches=micro_batches, **how)


def summed_step(
    model: nn.Module, x: Tensor, y: Tensor, loss_fn: nn.Module, replica_of: Sequence[int]
) -> Tensor:
    """A plain step of replicas: micro-batch k runs on replica ``replica_of[k]``; gradients are added in their order."""
    return plain.micro_batched_step(model, x, y, loss_fn, len(replica_of), replica_of=replica_of)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, dtype=torch.double), torch.randn(samples, 4, dtype=torch.double)


def model_for(chunks: int) -> nn.Sequential:
    """Two layers for each stage, of two devices with ``chunks`` stages each."""
    layers = [nn.Linear(3, 4), nn.Tanh()]
    for _ in range(2 * chunks - 1):
        layers += [nn.Linear(4, 4), nn.GELU()]
    return in_double(layers)
