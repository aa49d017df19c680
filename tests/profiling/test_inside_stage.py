"""Profiles of what one process has of layers that several processes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipepart
from pipepart import Profile
from pipepart.profiling.costs import Collective

WIDTH, SAMPLES = 32, 6
ROOFLINE = pipepart.Roofline.parse("cuda: 156 TFLOP/s, 1.5 TB/s, 5 us")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(self.up(value).relu())


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        return value


def share(layers: Mapping[str, nn.Module], mesh: Any) -> None:
    for layer in layers.values():
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def measured(model: nn.Module, tensor: int = 2, **keywords: Any) -> Profile:
    sample = torch.randn(2 * SAMPLES, WIDTH)
    keywords = {"parallelize": share, "seconds": 0.0, "devices": 1, "micro_batches": 2, **keywords}
    return pipepart.profile(model, sample, tensor=tensor, **keywords)


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        (nn.Sequential(*[Block() for _ in range(3)]), {}),
        (Recorded(), {}),
        (Recorded(), {"measure": False, "roofline": ROOFLINE}),
    ],
    ids=["Sequential", "recorded", "estimated"],
)
def test_costs_are_those_of_one_process(model: nn.Module, tensor: int, keywords: dict[str, Any]):
    profile = measured(model, tensor, **keywords)
    assert profile.tensor == tensor
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    inner, output = 4 * WIDTH // tensor, 4 * SAMPLES * WIDTH
    weights = 4 * (2 * WIDTH * inner + inner + WIDTH)  # all processes have the bias of the second layer
    all_reduce = (Collective(kind="all-reduce", bytes=output),)
    first, second, _ = profile.costs[0].layers
    for info, cost in zip(profile.layers, profile.costs[0].layers, strict=True):
        assert info.parameter_bytes == info.gradient_bytes == weights
        assert cost.output_bytes == cost.output_gradient_bytes == output
        assert cost.saved_bytes == output + 4 * SAMPLES * inner  # the input of each linear layer
        assert cost.forward_collectives == all_reduce
        assert cost.backward_collectives == (() if cost is first else all_reduce)  # no gradient of the input
        assert cost.forward.seconds > 0
        assert cost.backward_input.seconds + cost.backward_weight.seconds > 0
    assert first.forward_workspace_bytes == second.forward_workspace_bytes
    assert first.workspace_bytes == second.workspace_bytes


def test_the_model_and_the_process_are_left_as_they_were():
    model = Recorded()
    before = dict(model.named_parameters())
    profile = measured(model)
    assert all(now is before[name] and type(now) is nn.Parameter for name, now in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not dist.is_initialized()
    whole = pipepart.profile(model, torch.randn(12, WIDTH), seconds=0.0, devices=1, micro_batches=2)
    assert whole.tensor == 1
    assert [info.name for info in whole.layers] == [info.name for info in profile.layers]
    assert not any(cost.forward_collectives for cost in whole.costs[0].layers)


def test_one_process_has_a_mesh_of_replicas_alone():
    names: list[Any] = []
    measured(
        nn.Sequential(Block(), Block()),
        1,
        parallelize=lambda layers, mesh: names.append((*layers, mesh.mesh_dim_names, mesh.size())),
    )
    assert names == [("0", "1", ("dp",), 1)]
