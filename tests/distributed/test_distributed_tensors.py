"""Layers whose parameters or buffers are DTensors are refused before anything runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from pipepart import Pipeline
from tests.support.chains import plan_by_hand


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_distributed_tensor_is_refused_by_its_name(kind: str, mesh: DeviceMesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    made = distribute_tensor(torch.zeros(2, 2), mesh)
    layer = model.get_submodule("1.0")
    if kind == "parameter":
        layer.weight = nn.Parameter(made)
    else:
        del layer.weight
        layer.register_buffer("weight", made)
    with pytest.raises(ValueError, match=r"'1\.0\.weight' is a DTensor"):
        Pipeline(model, plan_by_hand(["0", "1"], [1], micro_batches=1), nn.MSELoss())
