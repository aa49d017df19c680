"""A small training with many kinds of state: a tied weight, statistics, random draws, momentum, a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipepart
from pipepart import Pipeline
from tests.support.chains import cut_by_hand


def model(tied: bool = True) -> nn.Sequential:
    """Eight layers. The first and the last linear layer share a weight."""
    torch.manual_seed(0)
    front = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.3)]
    made = nn.Sequential(*front, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    if tied:
        made[7].weight = made[0].weight
    return made


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


class Training(NamedTuple):
    """What a training loop has."""

    pipe: Pipeline
    optimizer: torch.optim.Optimizer | None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None

    def train(self, first: int, end: int) -> None:
        """Run the steps from ``first`` to before ``end``."""
        for number in range(first, end):
            x, y = batch(number)
            self.pipe.step(x, target=y)
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()

    def save(self, folder: Path, step: int, **how: Any) -> Path:
        return pipepart.save(folder, self.pipe, self.optimizer, step=step, scheduler=self.scheduler, **how)

    def load(self, folder: Path) -> Any:
        return pipepart.load(folder, self.pipe, self.optimizer, scheduler=self.scheduler)

    def state(self) -> dict[str, Tensor]:
        """A copy of the model's state, and of the optimizer's."""
        found = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        optimizers = self.pipe.optimizers if self.optimizer is None else [self.optimizer]
        names: dict[Any, str] = {parameter: name for name, parameter in self.pipe.named_parameters()}
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    found[f"{names[parameter]}.{key}"] = torch.as_tensor(value).clone()
        return found


def training(
    borders: Sequence[int] = (2, 5),
    of_stages: bool = False,
    module: nn.Sequential | None = None,
    **how: Any,
) -> Training:
    """A pipeline of four micro-batches, with an optimizer over all or one for each stage."""
    module = model() if module is None else module
    how = {"loss_fn": nn.MSELoss(), "micro_batches": 4, **how}
    if of_stages:
        return Training(cut_by_hand(module, borders, optimizer=adam, **how), None, None)
    pipe = cut_by_hand(module, borders, **how)
    optimizer = adam(pipe.parameters())
    return Training(pipe, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]))


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Adam with a state of three entries."""
    return torch.optim.AdamW(parameters, lr=0.05, amsgrad=True)
