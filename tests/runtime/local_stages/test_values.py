"""A process that runs some stages has their tensors, with the values of the whole model, and no memory of others."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart.runtime.build import build_stages
from tests.support.allocated import allocated
from tests.support.chains import plan_by_hand
from tests.support.deferred import deferred, twins
from tests.support.local_stages import process
from tests.support.tied import language_model

LAYERS, SIZE = 8, 256
LAYER_BYTES = SIZE * SIZE * 4 + SIZE * 4


class Positions(nn.Linear):
    """Adds a table that is not saved, and scales by a tensor that is an attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0, 1, 4).cos() * torch.rand(4), persistent=False)
        self.scale = torch.rand(4)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale + self.table


def varied() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        Positions(),
        nn.LSTM(4, 4, num_layers=2),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        Positions(),
    )
    return model.to(torch.float64)


def tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, in a fixed order."""
    return [*module.parameters(), *module.buffers()]


def names(model: nn.Sequential) -> list[str]:
    return [name for name, _ in model.named_children()]


@pytest.mark.parametrize("make", [varied, language_model])
@pytest.mark.parametrize("local", [{1}, {0, 2}])
def test_values_are_those_of_the_whole_model(make, local):
    plain, model = twins(make)
    borders = [2, 4]
    plan = plan_by_hand(names(plain), borders, micro_batches=2)  # type: ignore[arg-type]
    process(model, plan, local)
    spans = [(0, 2), (2, 4), (4, len(plain))]  # type: ignore[arg-type]
    mine = [index for stage in local for index in range(*spans[stage])]
    kept = {id(tensor) for index in mine for tensor in tensors(model[index])}  # type: ignore[index]
    found, expected = tensors(model), tensors(plain)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.is_meta is (id(one) not in kept)
        assert (one.shape, one.dtype, type(one)) == (other.shape, other.dtype, type(other))
        assert one.is_meta or torch.equal(one, other)


@pytest.mark.parametrize("make", [varied, language_model])
def test_a_model_that_was_made_whole_gives_its_other_layers_back(make):
    model: Any = make()
    parameters = list(model.parameters())
    before = [tensor.clone() for tensor in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    plan = plan_by_hand(names(model), [2, 4], micro_batches=2)
    build_stages(list(model.named_children()), plan, local={1})
    assert all(map(operator.is_, model.parameters(), parameters))
    used = set(map(id, model[2:4].parameters()))
    for one, was in zip(parameters, before, strict=True):
        assert one.is_meta is (id(one) not in used)
        assert one.is_meta or torch.equal(one, was)
    optimizer.step()  # a parameter without memory has no gradient


def test_gradients_of_other_layers_are_dropped():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    build_stages(list(model.named_children()), plan_by_hand(["0", "1"], [1], micro_batches=2), local={0})
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None


def wide() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))


def test_a_process_allocates_its_share_of_a_deferred_model():
    plan = plan_by_hand([str(index) for index in range(LAYERS)], [2, 4, 6], micro_batches=2)
    model = deferred(wide)
    found = allocated(lambda: process(model, plan, {3}))
    share = LAYERS * LAYER_BYTES // 4
    assert share <= found.kept < share + 4096
    assert found.peak < share + 2 * LAYER_BYTES


def test_a_model_that_was_made_whole_shrinks_to_the_share():
    plan = plan_by_hand([str(index) for index in range(LAYERS)], [2, 4, 6], micro_batches=2)

    def work() -> nn.Module:
        model = wide()
        build_stages(list(model.named_children()), plan, local={1})
        return model

    assert LAYERS * LAYER_BYTES // 4 <= allocated(work).kept < LAYERS * LAYER_BYTES // 4 + 4096
