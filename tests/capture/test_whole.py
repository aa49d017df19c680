"""``layers=[""]`` makes the whole model one layer, which is not recorded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipepart
from pipepart import LossError
from tests.support.recorded import assert_that_of_the_whole

pytestmark = pytest.mark.usefixtures("short_profiles")

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()


class Model(nn.Module):
    """A model that cannot be recorded, as it counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6)
        self.forwards = 0

    def forward(self, x: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Any:
        self.forwards += 1
        x = self.decoder(torch.tanh(self.encoder(x))) * scale
        return x if labels is None else {"loss": F.mse_loss(x, labels), "output": x}


@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, {}), (1, {"schedule": "gpipe", "micro_batches": 4}), (2, {"replicas": 2, "micro_batches": 2})],
)
def test_it_trains_as_the_model_does(devices, options):
    model = Model().double()
    plain = copy.deepcopy(model)
    pipe = pipepart.Pipeline.auto(
        model,
        pipepart.Arguments(X, scale=2.0),
        target=Y,
        loss_fn=F.mse_loss,
        layers=[""],
        devices=devices,
        **options,
    )
    with pipe:
        assert [stage.layers for stage in pipe.plan.stages] == [("Model",)]
        before = model.forwards
        loss = pipe.step(X, scale=2.0, target=Y)
        assert model.forwards > before  # the forward is the user's
        assert torch.equal(pipe(X), plain(X))
        assert pipe.state_dict().keys() == plain.state_dict().keys()
    expected = F.mse_loss(plain(X, scale=2.0), Y)
    assert_that_of_the_whole(model, plain, loss, expected, rtol=1e-12, atol=1e-15)


def test_its_own_loss_needs_a_reduction():
    model = Model().double()
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"layers": [""], "devices": 1, "micro_batches": 4}
    batch: dict[str, Any] = {"x": X, "labels": Y}
    with (
        pipepart.Pipeline.auto(model, batch, **settings) as pipe,
        pytest.raises(LossError, match="reduction"),
    ):
        pipe.step(**batch)
    model.zero_grad()
    with pipepart.Pipeline.auto(model, batch, reduction="mean", **settings) as pipe:
        loss = pipe.step(**batch)
        assert torch.equal(pipe(**batch)["output"], plain(X))
    assert_that_of_the_whole(model, plain, loss, plain(**batch)["loss"], rtol=1e-12, atol=1e-15)


def test_a_saved_plan_says_so(tmp_path: Path):
    profile = pipepart.profile(Model().double(), X, loss_fn=F.mse_loss, target=Y, layers=[""], seconds=0)
    assert [(layer.name, layer.modules) for layer in profile.layers] == [("Model", ("",))]
    pipepart.plan(profile, pipepart.Cluster.virtual(1)).save(tmp_path / "plan.json")
    plan = pipepart.Plan.load(tmp_path / "plan.json")
    with pipepart.Pipeline(Model().double(), plan, F.mse_loss) as pipe:
        pipe.step(X, target=Y)
