"""An ``nn.Sequential`` with the skippable layers of torchgpipe trains as it is."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipepart
from pipepart.capture import CaptureError
from tests.support import skippable as stand_in
from tests.support.recorded import assert_same_step, chain_for, piped

pytestmark = pytest.mark.usefixtures("short_profiles")


@pytest.fixture(params=["stand-in", pytest.param("torchgpipe", marks=pytest.mark.slow)])
def skip(request) -> ModuleType:
    if request.param == "torchgpipe":
        return pytest.importorskip("torchgpipe.skip")
    return stand_in


def layers_of(skip: Any) -> dict[str, Any]:
    """Skippable layers: some only pass values on, some compute, one does both and has a parameter of its own."""

    @skip.skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, x):
            yield skip.stash("skip", x)
            return x

    @skip.skippable(pop=["skip"])
    class PopCat(nn.Module):
        def forward(self, x):
            return torch.cat([x, (yield skip.pop("skip"))], 1)

    @skip.skippable(stash=["sum", "gate"])
    class Down(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2))
            self.scale = nn.Parameter(torch.ones(width) / 2)

        def forward(self, x):
            y = self.net(x) * self.scale
            yield skip.stash("sum", y)
            yield skip.stash("gate", None if len(x) == 1 else x > 0)
            return F.relu(y)

    @skip.skippable(pop=["sum", "gate"])
    class Up(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(2 * width, width)

        def forward(self, x):
            gate = yield skip.pop("gate")
            y = self.linear(x) + (yield skip.pop("sum"))
            return y if gate is None else y.masked_fill(gate, 0.1)

    return {"Stash": Stash, "PopCat": PopCat, "Down": Down, "Up": Up}


def model_of(skip: Any) -> nn.Sequential:
    """Skips within skips; three of them have the same name."""
    kinds = layers_of(skip)
    outer, inner = skip.Namespace(), skip.Namespace()
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        kinds["Stash"]().isolate(outer),
        nn.Linear(8, 8),
        kinds["Down"](8),
        nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), kinds["Stash"]().isolate(inner, only=["skip"])),
        nn.Tanh(),
        nn.Linear(8, 8),
        kinds["PopCat"]().isolate(inner),
        kinds["Up"](8),
        kinds["PopCat"]().isolate(outer),
        nn.Linear(16, 2),
    )


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("schedule", "stages", "recompute"), [("gpipe", 2, "never"), ("1f1b", 4, "always"), ("zb-h1", 3, "never")]
)
def test_gradients_are_those_of_plain_micro_batches(skip, schedule, stages, recompute):
    model = model_of(skip)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    settings = {"schedule": schedule, "stages": stages, "recompute": recompute, "parts": 4, "strict": True}
    assert_same_step(model, X, target=Y, loss_fn=F.mse_loss, **settings)


def test_values_go_past_the_stages_between(skip):
    with piped(model_of(skip), X, loss_fn=F.mse_loss, stages=4, parts=2, trace=True) as pipe:
        pipe.step(X, target=Y)
        assert pipe.last_trace is not None
        ways = {(one.source, one.target) for one in pipe.last_trace.transfers if str(one.kind) == "F"}
        assert (0, 3) in ways  # the outer skip


def test_names_are_those_of_the_model_and_every_call_is_recorded_once(skip):
    model = model_of(skip)
    names = set(model.state_dict())
    chain: Any = chain_for(model, X, loss_fn=F.mse_loss)
    assert [name for name, _ in chain.layers] == [
        "0", "2", "3.module.net.0", "3.module.net.1", "3.module.net.2", "4.0", "4.1", "5", "6", "8.module.linear", "10",
    ]  # fmt: skip
    first = chain.enter((X[:4],), {}).live.recording
    assert chain.enter((X[4:],), {}).live.recording is first
    with pipepart.Pipeline.auto(model, X, target=Y, loss_fn=F.mse_loss, devices=3, micro_batches=4) as pipe:
        pipe.step(X, target=Y)
        assert set(pipe.state_dict()) == names
        plain = copy.deepcopy(model).eval()
        pipe.eval()
        parts = X[:2], X[2:4], X[4:5], X[5:6]  # nothing is stashed as the gate of a single sample
        assert torch.equal(pipe(X[:6]), torch.cat([plain(part) for part in parts]))


def test_a_value_that_nobody_has_stashed_is_the_error_of_the_model(skip):
    kinds = layers_of(skip)
    model = nn.Sequential(nn.Linear(4, 8), kinds["PopCat"](), nn.Linear(16, 2))
    with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        chain_for(model, X, loss_fn=F.mse_loss)


def test_a_skippable_layer_that_cannot_be_recorded_is_refused_by_name(skip):
    @skip.skippable(stash=["skip"])
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            yield skip.stash("skip", x)
            return x * self.calls

    model = nn.Sequential(nn.Linear(4, 8), Counts(), nn.Tanh(), layers_of(skip)["PopCat"](), nn.Linear(16, 2))
    with pytest.raises(CaptureError, match=r"self\.calls"):
        chain_for(model, X, loss_fn=F.mse_loss)
