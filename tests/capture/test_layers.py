"""Which modules become layers: blocks, opened where one is too coarse, or those that the user names."""

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart.capture import CaptureError
from tests.support.recorded import assert_same_step, chain_for

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


def names(model: nn.Module, **options) -> list[str]:
    return [name for name, _ in chain_for(model, X, loss_fn=nn.functional.mse_loss, **options).layers]


def test_a_module_with_most_of_the_parameters_is_opened():
    assert names(Whole()) == ["stem", "body.first", "body.second", "body.third"]
    assert_same_step(Whole(), X, target=Y, loss_fn=nn.functional.mse_loss, stages=3)


def test_a_profile_says_what_was_opened():
    profile = pipepart.profile(Whole(), X, loss_fn=nn.functional.mse_loss, target=Y, seconds=0)
    assert profile.notes == ("Body opened (body): it has 76% of the parameters",)


def test_named_layers_stay_whole():
    assert names(Whole(), layers=["body"]) == ["stem", "body"]
    profile = pipepart.profile(
        Whole(), X, loss_fn=nn.functional.mse_loss, target=Y, layers=["body"], seconds=0
    )
    assert [layer.name for layer in profile.layers] == ["stem", "body"]
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(2, threads=1), schedule="gpipe")
    with pipepart.Pipeline(Whole(), plan, nn.functional.mse_loss) as pipe:
        pipe.step(X, target=Y)


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


def test_parts_that_are_called_one_by_one_become_layers():
    profile = pipepart.profile(HoldsIterated(), X, loss_fn=nn.functional.mse_loss, target=Y, seconds=0)
    assert [layer.name for layer in profile.layers] == [
        "body.stem",
        "body.parts.all.0",
        "body.parts.all.1",
        "body.parts.all.2",
    ]
    plan = pipepart.plan(profile, pipepart.Cluster.virtual(2, threads=1), schedule="gpipe")
    with pipepart.Pipeline(HoldsIterated(), plan, nn.functional.mse_loss) as pipe:
        pipe.step(X, target=Y)


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
