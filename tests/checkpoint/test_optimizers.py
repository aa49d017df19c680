"""Schedulers and optimizers of torch continue after loading as if there had been no interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import pipepart

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.StepLR(optimizer, 2)], [3]
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on(tmp_path: Path, name: str, steps: int) -> None:
    """Also at its start, where the best of a plateau is infinite."""
    module = nn.Linear(2, 2)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1, betas=(0.9, 0.99)) for _ in range(2)]
    one, other = (SCHEDULERS[name](optimizer) for optimizer in optimizers)
    rates(optimizers[0], one, steps)
    pipepart.save(tmp_path, module, optimizers[0], step=steps, scheduler=one)
    pipepart.load(tmp_path, module, optimizers[1], scheduler=other)
    assert rates(optimizers[1], other, 5) == rates(optimizers[0], one, 5)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1, amsgrad=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, 0.1, fused=True),
    "tensor": lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.1), foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=3),
}


@pytest.mark.parametrize(("name", "named"), [*((name, False) for name in OPTIMIZERS), ("adam", True)])
def test_an_optimizer_goes_on(tmp_path: Path, name: str, named: bool) -> None:
    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        return module, OPTIMIZERS[name](module.named_parameters() if named else module.parameters())

    def train(module: nn.Module, optimizer: Any) -> None:
        x = torch.linspace(-1, 1, 12, dtype=torch.double).reshape(4, 3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    one, other = made(), made()
    train(*one)
    pipepart.save(tmp_path, *one, step=3)
    pipepart.load(tmp_path, *other)
    for training in (one, other):
        train(*training)
    for parameter, wanted in zip(other[0].parameters(), one[0].parameters(), strict=True):
        assert parameter.equal(wanted)


def test_schedulers_of_stages_that_are_equal_load_into_another_number(tmp_path: Path) -> None:
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])

    def per_layer(layers: list[Any]) -> tuple[list[Any], list[Any]]:
        optimizers = [torch.optim.SGD(nn.ModuleList(layer).parameters(), 0.1) for layer in layers]
        return optimizers, [lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]

    three = per_layer([[module[0]], [module[1]], [module[2]]])
    two = per_layer([[module[0], module[1]], [module[2]]])
    for optimizer, scheduler in zip(*three, strict=True):
        optimizer.step()
        scheduler.step()
    pipepart.save(tmp_path, module, three[0], step=1, scheduler=three[1])
    pipepart.load(tmp_path, module, two[0], scheduler=two[1])
    assert [scheduler.last_epoch for scheduler in two[1]] == [1, 1]
    three[1][2].step()
    pipepart.save(tmp_path, module, three[0], step=2, scheduler=three[1])
    with pytest.raises(ValueError, match="has 3 schedulers with different states, and 2 are to be loaded"):
        pipepart.load(tmp_path, module, two[0], scheduler=two[1])
