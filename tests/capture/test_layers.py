"""Which modules become layers: blocks, opened where one is too coarse, or those that the user names."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipepart
from pipepart import LossError
from pipepart.capture import CaptureError
from tests.support.recorded import assert_that_of_the_whole, chain_for

pytestmark = pytest.mark.usefixtures("short_profiles")

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Body(nn.Module):
    """Layers under names of their own, and a sum around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x) * self.scale)
        return x + self.third(torch.tanh(self.second(y)))


class Whole(nn.Module):
    """Nearly all of it in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(6, 6), Body()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.stem(x))


class Iterated(nn.Module):
    """Calls the parts of its Sequential one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.parts = nn.ModuleDict({"all": nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))})

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.parts["all"].children():
            x = part(x)
        return x


class HoldsIterated(nn.Module):
    """Its only block is opened by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Iterated()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def names(model: nn.Module, **options) -> list[str]:
    return [name for name, _ in chain_for(model, X, loss_fn=F.mse_loss, **options).layers]


OPENED = "Body opened (body): it has 76% of the parameters"
PARTS = ["body.stem", "body.parts.all.0", "body.parts.all.1", "body.parts.all.2"]


@pytest.mark.parametrize(
    ("make", "options", "expected", "notes"),
    [
        (Whole, {}, ["stem", "body.first", "body.second", "body.third"], (OPENED,)),
        (Whole, {"layers": ["body"]}, ["stem", "body"], ()),
        (HoldsIterated, {}, PARTS, None),
    ],
)
def test_the_layers_of_a_profile_are_those_of_a_recording_and_run(make, options, expected, notes):
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    profile = pipepart.profile(model, X, loss_fn=F.mse_loss, target=Y, seconds=0, **options)
    assert [layer.name for layer in profile.layers] == names(make(), **options) == expected
    assert notes is None or profile.notes == notes
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(2, threads=1), schedule="gpipe")
    with pipepart.Pipeline(model, plan, F.mse_loss) as pipe:
        loss = pipe.step(X, target=Y)
    assert_that_of_the_whole(model, plain, loss, F.mse_loss(plain(X), Y))


def test_an_unknown_layer():
    with pytest.raises(CaptureError, match="has no module 'middle'"):
        names(Whole(), layers=["middle"])


def test_a_model_on_the_meta_device_has_the_layers_of_a_real_one():
    with torch.device("meta"):
        model = Whole()
    chain = pipepart.capture.chain_of(model, split_loss=False)
    assert isinstance(chain, pipepart.capture.RecordedChain)
    chain.bind((X.to("meta"),), {})
    assert [name for name, _ in chain.layers] == names(Whole())


class Counts(nn.Module):
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
def test_a_model_that_is_one_layer_trains_without_a_recording(devices, options, tmp_path: Path):
    """Its plan, once saved, is that of such a model."""
    model, x, y = Counts().double(), X.double(), Y.double()
    plain = copy.deepcopy(model)
    batch = pipepart.Arguments(x, scale=2.0)
    with pipepart.Pipeline.auto(
        model, batch, target=y, loss_fn=F.mse_loss, layers=[""], devices=devices, **options
    ) as pipe:
        assert [stage.layers for stage in pipe.plan.stages] == [("Counts",)]
        pipe.plan.save(tmp_path / "plan.json")
    with pipepart.Pipeline(model, pipepart.Plan.load(tmp_path / "plan.json"), F.mse_loss) as pipe:
        before = model.forwards
        loss = pipe.step(x, scale=2.0, target=y)
        assert model.forwards > before  # the forward is the user's
        assert torch.equal(pipe(x), plain(x))
        assert pipe.state_dict().keys() == plain.state_dict().keys()
    assert_that_of_the_whole(model, plain, loss, F.mse_loss(plain(x, scale=2.0), y), rtol=1e-12, atol=1e-15)


def test_the_own_loss_of_such_a_model_needs_a_reduction():
    model = Counts().double()
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"layers": [""], "devices": 1, "micro_batches": 4}
    batch: dict[str, Any] = {"x": X.double(), "labels": Y.double()}
    with (
        pipepart.Pipeline.auto(model, batch, **settings) as pipe,
        pytest.raises(LossError, match="reduction"),
    ):
        pipe.step(**batch)
    model.zero_grad()
    with pipepart.Pipeline.auto(model, batch, reduction="mean", **settings) as pipe:
        loss = pipe.step(**batch)
        assert torch.equal(pipe(**batch)["output"], plain(batch["x"]))
    assert_that_of_the_whole(model, plain, loss, plain(**batch)["loss"], rtol=1e-12, atol=1e-15)
