"""Pipelines that train several copies of a model, cut by hand, and the oracle that sums as they do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import schedules
from pipepart import Cluster, Pipeline, Plan
from pipepart.capture import flatten
from pipepart.planning import StagePlan

from .chains import Recompute
from .plain import in_double, twin

# The copies that four micro-batches take where there are two.
IN_TURN = (0, 1, 0, 1)


def plan_copies(
    names: Sequence[str],
    borders: Sequence[int],
    copies: int,
    *,
    micro_batches: int = 4,
    schedule: str = "1f1b",
    chunks: int = 1,
    recompute: Recompute = "never",
) -> Plan:
    """A plan whose copies lie one behind the other on virtual devices of one thread."""
    edges = [0, *borders, len(names)]
    stages = len(edges) - 1
    devices = stages // chunks
    cluster = Cluster.virtual(devices * copies, threads=1)
    homes = schedules.build(schedule, devices, micro_batches, chunks).device_of[:stages]
    return Plan(
        stages=tuple(
            StagePlan(layers=tuple(names[start:end]), device=cluster.devices[home].name, recompute=recompute)
            for start, end, home in zip(edges, edges[1:], homes, strict=False)
        ),
        cluster=cluster,
        schedule=schedule,
        micro_batches=micro_batches,
        chunks=chunks,
        replica_devices=tuple(
            tuple(cluster.devices[copy * devices + home].name for home in homes) for copy in range(1, copies)
        ),
    )


def cut_copies(
    model: nn.Module,
    borders: Sequence[int],
    copies: int,
    *,
    loss_fn: Any = None,
    trace: bool = False,
    deferred_batch_norm: bool = False,
    **how: Any,
) -> Pipeline:
    """The model as a pipeline of so many copies; ``how`` as for :func:`plan_copies`."""
    plan = plan_copies([name for name, _ in flatten(model)], borders, copies, **how)
    return Pipeline(model, plan, loss_fn=loss_fn, trace=trace, deferred_batch_norm=deferred_batch_norm)


def summed_step(model: nn.Module, x: Tensor, y: Tensor, loss_fn: nn.Module, copy_of: Sequence[int]) -> Tensor:
    """A plain step of copies, each micro-batch through the one that is said; gradients are added copy after copy.

    The first copy is the model itself, so it adds to the gradients that are there.
    """
    parts = len(copy_of)
    twins = [model, *(twin(model) for _ in range(max(copy_of)))]
    for other in twins[1:]:
        other.zero_grad()
    losses = []
    for index, (xs, ys) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
        loss = loss_fn(twins[copy_of[index]](xs), ys)
        share = len(xs) / len(x)
        loss.backward(torch.full((), share, dtype=loss.dtype))
        losses.append(loss.detach() * share)
    with torch.no_grad():
        for other in twins[1:]:
            for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
                if theirs.grad is not None:
                    own.grad = theirs.grad if own.grad is None else own.grad + theirs.grad
    return torch.stack(losses).sum()


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, dtype=torch.double), torch.randn(samples, 4, dtype=torch.double)


def model_for(chunks: int) -> nn.Sequential:
    """Two layers for each of two times so many stages."""
    layers = [nn.Linear(3, 4), nn.Tanh()]
    for _ in range(2 * chunks - 1):
        layers += [nn.Linear(4, 4), nn.GELU()]
    return in_double(layers)


def cut_in_two(model: nn.Module, copies: int = 2, **how: Any) -> Pipeline:
    """Two stages, the second from layer 2 on."""
    return cut_copies(model, [2], copies, loss_fn=nn.MSELoss(), **how)
