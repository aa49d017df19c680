"""A plan says what of its model is not as it was profiled, and sees no change where there is none."""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Cluster, Pipeline, Plan
from pipepart.capture import capture, describe
from pipepart.planning import ModelChanged, StagePlan, model_changes, warn_of_changes

SAMPLE = torch.zeros(8, 4)


def body() -> nn.Sequential:
    """Layers of all sorts: without parameters, nested, with buffers, frozen, and two that share a weight."""
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    frozen = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(
        OrderedDict(
            enter=nn.Linear(4, 4),
            norm=nn.BatchNorm1d(4),
            middle=nn.Sequential(one, nn.ReLU(), other),
            frozen=frozen,
            drop=nn.Dropout(0.5),
            leave=nn.Linear(4, 2, bias=False),
        )
    )


def plan_of(model: nn.Module, sample: torch.Tensor = SAMPLE) -> Plan:
    profile = pipepart.profile(model, sample, micro_batches=2, seconds=0.0)
    return pipepart.plan(profile, Cluster.virtual(2), schedule="1f1b")


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return body()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(body())


SAME: dict[str, Callable[[Any], nn.Module]] = {
    "the same model": lambda model: model,
    "rebuilt": lambda model: body(),
    "copied": copy.deepcopy,
    "in evaluation mode": lambda model: model.eval(),
    "on another device": lambda model: on_meta(),
    "with other values": lambda model: (nn.init.ones_(model.enter.weight), model)[1],
    "trained": lambda model: (model(torch.ones(8, 4)).sum().backward(), model)[1],
    "loaded": lambda model: (model.load_state_dict(body().state_dict()), model)[1],
    "with hooks": lambda model: (model.enter.register_forward_hook(lambda *_: None), model)[1],
    "there and back in dtype": lambda model: model.double().float(),
}


@pytest.mark.parametrize("case", SAME)
def test_what_does_not_change_a_model(case, plan):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = SAME[case](body())
        assert model_changes(plan, model) == []
        warn_of_changes(plan, model)


def set_layer(model: nn.Sequential, name: str, layer: nn.Module) -> nn.Sequential:
    model.set_submodule(name, layer)
    return model


def untied(model: nn.Sequential) -> nn.Sequential:
    return set_layer(model, "middle.2", nn.Linear(4, 4))


def renamed(model: nn.Sequential) -> nn.Sequential:
    layers = model._modules
    return nn.Sequential(OrderedDict((name.replace("drop", "dropout"), layers[name]) for name in layers))  # type: ignore[misc]


def swapped(model: nn.Sequential) -> nn.Sequential:
    names = ["enter", "norm", "middle", "drop", "frozen", "leave"]
    return nn.Sequential(OrderedDict((name, model._modules[name]) for name in names))  # type: ignore[misc]


class Faster(nn.ReLU):
    """Looks like torch's."""

    def __repr__(self) -> str:
        return "ReLU()"


LEAVE = "Linear(in_features=4, out_features=2, bias=False)"

CHANGED: dict[str, tuple[Callable[[Any], nn.Module], list[str]]] = {
    "other arguments": (
        lambda model: set_layer(model, "drop", nn.Dropout(0.1)),
        ["layer 'drop': module now Dropout(p=0.1, inplace=False), before Dropout(p=0.5, inplace=False)"],
    ),
    "wider": (
        lambda model: set_layer(model, "leave", nn.Linear(4, 300, bias=False)),
        [f"layer 'leave': module now Linear(in_features=4, out_features=300, bias=False), before {LEAVE}"],
    ),
    "another class": (
        lambda model: set_layer(model, "middle.1", nn.GELU()),
        ["layer 'middle.1': module now GELU(approximate='none'), before ReLU()"],
    ),
    "frozen": (
        lambda model: (model.enter.requires_grad_(False), model)[1],
        ["layer 'enter': trained parameters now 0 bytes, before 80 bytes"],
    ),
    "half frozen": (
        lambda model: (model.enter.bias.requires_grad_(False), model)[1],
        ["layer 'enter': trained parameters now 64 bytes, before 80 bytes"],
    ),
    "thawed": (
        lambda model: (model.frozen.requires_grad_(), model)[1],
        ["layer 'frozen': trained parameters now 80 bytes, before 0 bytes"],
    ),
    "one layer of another dtype": (
        lambda model: (model.leave.double(), model)[1],
        ["layer 'leave': dtype now float64, before float32"],
    ),
    "a parameter more": (
        lambda model: (model.drop.register_parameter("more", nn.Parameter(torch.ones(512))), model)[1],
        ["layer 'drop': parameters now 2048 bytes (2.0 KiB), before 0 bytes"],
    ),
    "a parameter that grew": (
        lambda model: (setattr(model.leave, "weight", nn.Parameter(torch.ones(512, 4))), model)[1],
        ["layer 'leave': parameters now 8192 bytes (8.0 KiB), before 32 bytes"],
    ),
    "untied": (untied, ["layer 'middle.2': tensors shared with now none, before 'middle.0'"]),
    "tied": (
        lambda model: (setattr(model.frozen, "bias", model.enter.bias), model)[1],
        [
            "layer 'frozen': tensors shared with now 'enter', before none",
        ],
    ),
    "renamed": (renamed, ["layer 'drop' (Dropout(p=0.5, inplace=False)) is gone", "layer 'dropout' (D"]),
    "in another order": (swapped, ["layer 'drop' stands where layer 'frozen' was"]),
    "cut off": (lambda model: model[:-1], [f"layer 'leave' ({LEAVE}) is gone"]),
    "of another class that looks the same": (
        lambda model: set_layer(model, "middle.1", Faster()),
        ["layer 'middle.1': class now Faster, before ReLU"],
    ),
    "two layers": (
        lambda model: set_layer(untied(model), "leave", nn.Identity()),
        ["layer 'middle.2': tensors shared", f"layer 'leave': module now Identity(), before {LEAVE}"],
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_change_is_told_by_layer(case, plan):
    change, wanted = CHANGED[case]
    found = model_changes(plan, change(body()))
    assert len(found) == len(wanted), found
    for text, start in zip(found, wanted, strict=True):
        assert text.startswith(start)


def test_half_precisions_of_one_size_are_told_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).bfloat16()
    plan = plan_of(model, SAMPLE.bfloat16())
    assert model_changes(plan, model) == []
    assert model_changes(plan, model.half()) == ["layer '0': dtype now float16, before bfloat16"]


def test_lazy_layers_are_what_they_became():
    def lazy() -> nn.Sequential:
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU())

    model = lazy()
    model(SAMPLE)
    plan = plan_of(model)
    again = lazy()
    with pytest.raises(ValueError, match="call it once on a sample first"):
        model_changes(plan, again)
    again(SAMPLE)
    assert model_changes(plan, again) == []
    assert model_changes(plan, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())) == []


class Calls(nn.Module):
    """Shows a function in its repr, as layers do that are given one."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def extra_repr(self) -> str:
        return f"function={self.function}"

    def forward(self, value):
        return self.function(value)


def test_where_a_function_lies_is_no_change():
    def twice():
        return lambda value: 2 * value

    plan = plan_of(nn.Sequential(nn.Linear(4, 4), Calls(twice())))
    assert model_changes(plan, nn.Sequential(nn.Linear(4, 4), Calls(twice()))) == []
    found = model_changes(plan, nn.Sequential(nn.Linear(4, 4), Calls(torch.relu)))
    assert len(found) == 1
    assert "0x" not in found[0]


def test_nothing_runs_and_nothing_changes():
    ran = []

    class Layer(nn.Linear):
        def forward(self, value):  # pyright: ignore[reportIncompatibleMethodOverride]
            ran.append(value)
            return super().forward(value)

    def model() -> nn.Sequential:
        return nn.Sequential(Layer(4, 4), nn.Dropout())

    plan = plan_of(model())
    ran.clear()
    now, state = model(), torch.get_rng_state()
    assert model_changes(plan, now) == []
    assert ran == []
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_described_as_they_are_captured():
    model = body()
    without_outputs = [info.model_copy(update={"outputs": ()}) for info in capture(model, SAMPLE).layers]
    assert describe(model) == without_outputs


def test_a_plan_by_hand_knows_of_no_change():
    plan = Plan(
        stages=(StagePlan(layers=("a",), device="virtual:0"),),
        cluster=Cluster.virtual(1),
        schedule="1f1b",
        micro_batches=1,
    )
    assert model_changes(plan, body()) == []


def test_a_model_that_was_trained_along_its_plan_is_the_same(plan):
    model = body()
    with Pipeline(model, plan, nn.MSELoss()) as pipe:
        assert model_changes(plan, model) == []
        pipe.step(torch.ones(8, 4), target=torch.zeros(8, 2))
    assert model_changes(plan, model.eval()) == []


def test_a_loaded_plan_remembers_its_model(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert model_changes(loaded, body()) == []
    assert len(model_changes(loaded, untied(body()))) == 1


def test_the_warning_names_the_first_changes_and_points_at_the_caller(plan):
    with pytest.warns(ModelChanged) as caught:
        warn_of_changes(plan, body().double(), stacklevel=1)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith(
        "the costs of the plan may be wrong: layer 'enter': dtype now float64, before float32; "
    )
    assert text.endswith("Profile the model and plan again")
    assert "layer 'middle.0'" in text
    assert "; and 1 more. " in text
    assert caught[0].filename == __file__
    with pytest.warns(ModelChanged, match=r"; and 4 more\. Profile the model"):
        warn_of_changes(plan, nn.Sequential(nn.Identity()))
