"""Deep copies share nothing with the original, not even an autograd graph."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from pipepart.capture.deep_copies import deep_copies


def layer(kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = nn.Linear(4, 4)
        if kind == "scripted":
            return torch.jit.script(linear)
        return torch.jit.trace(linear, torch.randn(2, 4)) if kind == "traced" else linear


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["plain", "scripted", "traced"])
def test_the_backward_of_a_copy_leaves_the_first_alone(kind):
    model = nn.Sequential(layer(kind), nn.Linear(4, 4))
    (twin,) = deep_copies(model)
    x = torch.randn(3, 4)
    assert twin(x).equal(model(x))
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.is_leaf and parameter.grad is not None for parameter in twin.parameters())
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["plain", "scripted", "traced"])
def test_what_is_frozen_is_frozen_in_the_copy(kind):
    model = nn.Sequential(layer(kind))
    next(model.parameters()).requires_grad_(False)
    (twin,) = deep_copies(model)
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert [p.requires_grad for p in twin.parameters()].count(False) == 1
