"""The oracle of asynchronous training: a plain loop that keeps all versions of all weights."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def borders_of(stages: int) -> list[int]:
    """Two layers a stage."""
    return [2 * stage for stage in range(1, stages)]


class DelayedTraining:
    """A chain whose micro-batches run one after the other, on weights that lack steps as the papers say.

    Counting from 0, the weights of stage s of p for micro-batch k have taken max(k - (p - 1 - s), 0) steps since the
    mini-batch began under ``pipedream``, and max(k // p - 1, 0) under ``pipedream-2bw``, which steps every p.
    """

    def __init__(self, model: nn.Sequential, stages: int, schedule: str, factory: OptimizerFactory) -> None:
        edges = [0, *borders_of(stages), len(model)]
        self.schedule = schedule
        self.every = 1 if schedule == "pipedream" else stages
        self.stages = [model[start:end] for start, end in pairwise(edges)]
        self.optimizers = [factory(list(stage.parameters())) for stage in self.stages]
        self.versions: list[list[dict[str, Tensor]]] = []

    def version(self, stage: int, micro_batch: int) -> int:
        """Return the number of steps taken by the weights that a micro-batch uses."""
        if self.schedule == "pipedream":
            return max(micro_batch - (len(self.stages) - 1 - stage), 0)
        return max(micro_batch // self.every - 1, 0)

    def step(
        self,
        x: Tensor,
        y: Tensor,
        loss_fn: Callable[..., Tensor],
        micro_batches: int,
        weigh: Callable[[Tensor], float] = len,
    ) -> Tensor:
        """Train on one mini-batch; return the mean of the losses of the optimizer steps."""
        self.versions = [[_copies(stage)] for stage in self.stages]
        xs, ys = x.tensor_split(micro_batches), y.tensor_split(micro_batches)
        losses = []
        for start in range(0, micro_batches, self.every):
            group = range(start, start + self.every)
            total = sum(weigh(ys[k]) for k in group)
            shares = [weigh(ys[k]) / total for k in group]
            parts = [self._backward(k, xs[k], ys[k], loss_fn, s) for k, s in zip(group, shares, strict=True)]
            losses.append((torch.stack(parts) * torch.tensor(shares, dtype=x.dtype)).sum())
            for stage, optimizer, versions in zip(self.stages, self.optimizers, self.versions, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                versions.append(_copies(stage))
        return torch.stack(losses).mean()

    def _backward(
        self, micro_batch: int, x: Tensor, y: Tensor, loss_fn: Callable[..., Tensor], share: float
    ) -> Tensor:
        used = [
            {
                name: t.clone().requires_grad_()
                for name, t in versions[self.version(stage, micro_batch)].items()
            }
            for stage, versions in enumerate(self.versions)
        ]
        for stage, weights in zip(self.stages, used, strict=True):
            x = functional_call(stage, weights, (x,))
        loss = loss_fn(x, y)
        loss.backward(torch.full_like(loss, share))
        for stage, weights in zip(self.stages, used, strict=True):
            for name, parameter in stage.named_parameters():
                found = weights[name].grad
                assert found is not None
                parameter.grad = found if parameter.grad is None else parameter.grad + found
        return loss.detach()


def _copies(stage: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
