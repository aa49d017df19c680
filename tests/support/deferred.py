"""Compares deferred constructions of modules with plain ones from the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipepart import Pipeline, deferred_init
from pipepart.capture import RecordedChain, deferred
from tests.support.chains import plan_by_hand
from tests.support.recorded import borders_of, chain_for


def assert_same_values(make: Callable[[], nn.Module]) -> None:
    """Assert that each tensor of a deferred module gets the bits that the plain construction gives it."""
    plain, module = twins(make)
    got: dict[int, Tensor] = {}
    held = _tensors(module)
    meta = {name: tensor for name, tensor in held.items() if tensor.is_meta}
    deferred.refuse_unknown(meta.items(), weights=False)
    deferred.values_of(
        dict.fromkeys(meta.values()), lambda tensor, values: got.__setitem__(id(tensor), values)
    )
    expected = _tensors(plain)
    assert held.keys() == expected.keys()
    for name, one in expected.items():
        values = got.get(id(held[name]), held[name])
        assert (values.dtype, values.shape, values.stride()) == (one.dtype, one.shape, one.stride()), name
        assert torch.equal(values, one), name
        assert held[name].requires_grad == one.requires_grad, name
        assert isinstance(held[name], nn.Parameter) == isinstance(one, nn.Parameter), name


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a plain model and a deferred one that is constructed from the same seed."""
    seed()
    plain = make()
    seed()
    with deferred_init():
        return plain, make()


def pipelines(
    make: Callable[[], nn.Module], sample: Any, *, stages: int = 3, loss_fn: Any = None, **options: Any
) -> tuple[Pipeline, Pipeline]:
    """Return the pipelines of a plain model and of its deferred twin."""
    plain, model = twins(make)
    chain = chain_for(plain, sample, loss_fn=loss_fn)
    names = [name for name, _ in chain.layers]
    plan = plan_by_hand(names, borders_of(len(names), stages), micro_batches=2)
    same = RecordedChain(model, chain.groups, split_loss=loss_fn is None) if chain.groups else model
    return Pipeline(chain, plan, loss_fn), Pipeline(same, plan, loss_fn, **options)  # type: ignore[arg-type]


def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, and tensors among the attributes, by their names."""
    return {
        f"{path}.{name}": tensor
        for path, part in module.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items(), *vars(part).items())
        if isinstance(tensor, Tensor)
    }


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
