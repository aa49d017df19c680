"""A plan says what of its model is not as it was profiled, and sees no change where there is none."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Cluster, Plan
from pipepart.planning import ModelChanged, model_changes, warn_of_changes
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")

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
    "rebuilt": lambda model: body(),
    "in evaluation mode": lambda model: model.eval(),
    "on another device": lambda model: on_meta(),
    "trained": lambda model: (model(torch.ones(8, 4)).sum().backward(), model)[1],
    "with hooks": lambda model: (model.enter.register_forward_hook(lambda *_: None), model)[1],
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


def rearranged(model: nn.Sequential, **names: str) -> nn.Sequential:
    """The same layers, in the order of their old names, under their new ones."""
    return nn.Sequential(OrderedDict((new, model.get_submodule(old)) for old, new in names.items()))


class Faster(nn.ReLU):
    """Looks like torch's."""

    def __repr__(self) -> str:
        return "ReLU()"


ORDER = {name: name for name in ("enter", "norm", "middle", "frozen", "drop", "leave")}
SWAPPED = {name: name for name in ("enter", "norm", "middle", "drop", "frozen", "leave")}
CHANGED: dict[str, tuple[Callable[[Any], nn.Module], list[str]]] = {
    "other arguments": (
        lambda model: set_layer(model, "drop", nn.Dropout(0.1)),
        ["layer 'drop': module now Dropout(p=0.1, inplace=False), before Dropout(p=0.5, inplace=False)"],
    ),
    "frozen": (
        lambda model: (model.enter.requires_grad_(False), model)[1],
        ["layer 'enter': trained parameters now 0 bytes, before 80 bytes"],
    ),
    "one layer of another dtype": (
        lambda model: (model.leave.double(), model)[1],
        ["layer 'leave': dtype now float64, before float32"],
    ),
    "a parameter more": (
        lambda model: (model.drop.register_parameter("more", nn.Parameter(torch.ones(512))), model)[1],
        ["layer 'drop': parameters now 2048 bytes, before 0 bytes"],
    ),
    "untied": (
        lambda model: set_layer(model, "middle.2", nn.Linear(4, 4)),
        ["layer 'middle.2': tensors shared with now none, before 'middle.0'"],
    ),
    "renamed": (
        lambda model: rearranged(model, **{**ORDER, "drop": "dropout"}),
        ["layer 'drop' (Dropout(p=0.5, inplace=False)) is gone", "layer 'dropout' (D"],
    ),
    "in another order": (
        lambda model: rearranged(model, **SWAPPED),
        ["layer 'drop' stands where layer 'frozen' was"],
    ),
    "of another class that looks the same": (
        lambda model: set_layer(model, "middle.1", Faster()),
        ["layer 'middle.1': class now Faster, before ReLU"],
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_change_is_told_by_layer(case, plan):
    change, wanted = CHANGED[case]
    found = model_changes(plan, change(body()))
    assert len(found) == len(wanted), found
    for text, start in zip(found, wanted, strict=True):
        assert text.startswith(start)


def test_lazy_layers_are_what_they_became():
    def lazy() -> nn.Sequential:
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU())

    model = lazy()
    model(SAMPLE)
    plan = plan_of(model)
    again = lazy()
    with pytest.raises(ValueError, match="call it once on a sample first"):
        model_changes(plan, again)
    assert model_changes(plan, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())) == []


class Shown(Calls):
    """Shows its function in its repr, as layers do that are given one."""

    def extra_repr(self) -> str:
        return f"function={self.function}"


def test_where_a_function_lies_is_no_change():
    def twice():
        return lambda value: 2 * value

    plan = plan_of(nn.Sequential(nn.Linear(4, 4), Shown(twice())))
    assert model_changes(plan, nn.Sequential(nn.Linear(4, 4), Shown(twice()))) == []
    found = model_changes(plan, nn.Sequential(nn.Linear(4, 4), Shown(torch.relu)))
    assert len(found) == 1
    assert "0x" not in found[0]


def test_the_warning_names_the_first_changes_and_points_at_the_caller(plan):
    with pytest.warns(ModelChanged) as caught:
        warn_of_changes(plan, body().double(), stacklevel=1)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "layer 'enter': dtype now float64, before float32; layer 'norm'" in text
    assert "; and 1 more. " in text
    assert caught[0].filename == __file__
