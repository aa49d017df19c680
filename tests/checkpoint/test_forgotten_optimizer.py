"""Loading a checkpoint with optimizer state but without an optimizer, as if the argument was forgotten."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import pipepart


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    adam = torch.optim.Adam(module.parameters())
    adam.step()
    pipepart.save(tmp_path, module, adam, step=1)
    return tmp_path


def test_a_training_that_goes_on_without_its_optimizer_is_warned(folder: Path):
    with pytest.warns(UserWarning, match="has the state of an optimizer, which is not loaded"):
        pipepart.load(folder, nn.Linear(2, 2))


def test_no_warning_with_the_optimizer_or_for_a_model_that_is_not_trained(folder: Path):
    module = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipepart.load(folder, module, torch.optim.Adam(module.parameters()))
        pipepart.load(folder, nn.Linear(2, 2).eval())
