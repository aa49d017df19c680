"""Makes models whose parameters have no memory, and twins of them with the same initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipepart import Pipeline, deferred_init
from pipepart.capture import RecordedChain
from pipepart.runtime.placing import InitialValues, Places
from tests.support.chains import cut_by_hand
from tests.support.recorded import borders_of, chain_for


def initialize(module: nn.Module) -> None:
    """Draw all parameters that a module holds itself."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.3)


def reset_parameters(module: nn.Module) -> None:
    """Initialize a layer of torch as its constructor does."""
    getattr(module, "reset_parameters", getattr(module, "_reset_parameters", int))()


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    """Construct a model whose parameters have no memory."""
    torch.manual_seed(0)
    with deferred_init():
        return make()


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a model with initial values, and one whose parameters get the same values by :func:`initialize`."""
    plain = deferred(make)
    values = InitialValues.of(plain, None, initialize)
    assert values is not None
    torch.manual_seed(1)
    values.fill(Places({}, frozenset()))
    model = deferred(make)
    torch.manual_seed(1)
    return plain, model


def pipelines(
    make: Callable[[], nn.Module], sample: Any, *, stages: int = 3, loss_fn: Any = None, **options: Any
) -> tuple[Pipeline, Pipeline]:
    """Return the pipelines of a model with values and of its deferred twin."""
    plain, model = twins(make)
    chain = chain_for(plain, sample, loss_fn=loss_fn)
    borders = borders_of(len(chain.layers), stages)
    same = RecordedChain(model, chain.groups, split_loss=loss_fn is None) if chain.groups else model
    torch.manual_seed(1)
    pipe = cut_by_hand(same, borders, loss_fn=loss_fn, micro_batches=2, initialize=initialize, **options)
    return cut_by_hand(chain, borders, loss_fn=loss_fn, micro_batches=2), pipe


class Tied(nn.Module):
    """Has tied weights, a buffer that is not saved, a table in an attribute, and a parameter that no call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Parameter(torch.randn(2))
        self.register_buffer("places", torch.linspace(0, 1, 6).cos(), persistent=False)
        self.table = torch.rand(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.table
        return self.head(x)
