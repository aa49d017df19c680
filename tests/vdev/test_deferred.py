"""Deferred models on devices with memories of their own: each stage gets its values on its device."""

import pytest
import torch
from torch import nn

from pipepart import Pipeline, deferred_init
from tests.support.chains import plan_by_hand
from tests.support.on_devices import on_devices

LOSS = nn.functional.cross_entropy


def model() -> nn.Sequential:
    made = nn.Sequential(
        nn.Embedding(20, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 20, bias=False)
    )
    made[3].weight = made[0].weight
    return made


@pytest.mark.parametrize("source", ["construction", "file"])
def test_each_stage_is_on_its_device(source, tmp_path):
    torch.manual_seed(0)
    plain = model()
    options = {}
    if source == "file":
        save_model = pytest.importorskip("safetensors.torch").save_model
        save_model(plain, str(tmp_path / "model.safetensors"))
        options = {"weights": tmp_path}
    torch.manual_seed(0)
    with deferred_init():
        deferred = model()
    weight = deferred[0].weight
    plan = on_devices(
        plan_by_hand(["0", "1", "2", "3"], [1, 3], micro_batches=2), ("vdev:0", "vdev:1", "vdev:2")
    )
    x, y = torch.randint(20, (8,)), torch.randint(20, (8,))
    with Pipeline(deferred, plan, LOSS, **options) as pipe, Pipeline(plain, plan, LOSS) as other:
        assert deferred[0].weight is weight is deferred[3].weight
        places = {name: str(tensor.device) for name, tensor in pipe.state_dict().items()}
        assert places["0.weight"] == places["3.weight"] == "vdev:0"
        assert {places[name] for name in places if name[0] in "12"} == {"vdev:1"}
        for mine, its in zip(pipe.state_dict().values(), plain.state_dict().values(), strict=True):
            assert torch.equal(mine.cpu(), its.cpu())
        assert torch.equal(pipe.step(x, target=y).cpu(), other.step(x, target=y).cpu())
