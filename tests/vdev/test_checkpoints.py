"""A checkpoint of a model on such devices has the values after the step, though streams still run when it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from tests.support.on_devices import cut_on, sample
from tests.vdev.devices import delayed

DEVICES = "vdev:0", "vdev:1"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def trained(made: Any, count: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    for _ in range(count):
        made.step(x, target=y)
    return {name: value.cpu() for name, value in made.state_dict().items()}


@pytest.mark.parametrize(("asynchronous", "seed"), [(False, 0), (True, 1)])
def test_what_streams_still_write_is_waited_for(tmp_path: Path, asynchronous: bool, seed: int) -> None:
    x, y = sample(8, 16)
    with cut_on(DEVICES, model(), [3], nn.MSELoss(), optimizer=adam) as pipe:
        middle, wanted = trained(pipe, 2, x, y), trained(pipe, 2, x, y)
    with delayed(seed=seed), cut_on(DEVICES, model(), [3], nn.MSELoss(), optimizer=adam) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        pipepart.save(tmp_path, pipe, step=2, asynchronous=asynchronous)
        pipe.step(x, target=y)
    with delayed(seed=seed), cut_on(DEVICES, model(), [2], nn.MSELoss(), optimizer=adam) as pipe:
        assert pipepart.load(tmp_path, pipe).step == 2
        assert all(value.cpu().equal(middle[name]) for name, value in pipe.state_dict().items())
        found = trained(pipe, 2, x, y)
    assert all(value.equal(wanted[name]) for name, value in found.items())
