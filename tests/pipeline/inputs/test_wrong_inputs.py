"""What cannot run is refused before anything has run, with the values that are wrong."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Pipeline
from tests.support.chains import cut_by_hand, plan_by_hand

pytestmark = pytest.mark.usefixtures("short_profiles")


class Counted(nn.Module):
    """Counts its calls with real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def network() -> nn.Sequential:
    return nn.Sequential(Counted(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def assert_untouched(model: nn.Sequential) -> None:
    """No layer was called, no statistic moved, no gradient came to be."""
    counted = model[0]
    assert isinstance(counted, Counted)
    assert counted.calls == 0
    assert model.state_dict()["2.num_batches_tracked"] == 0
    assert all(parameter.grad is None for parameter in model.parameters())


X, Y = torch.randn(6, 4), torch.randn(6, 2)
WRONG_STEPS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no input": ((), {"target": Y}, TypeError, r"takes \(x.* 0 positional arguments: missing"),
    "two inputs": ((X, X), {"target": Y}, TypeError, "2 positional arguments: too many"),
    "input and keyword": ((X,), {"mask": X, "target": Y}, TypeError, "unexpected keyword argument 'mask'"),
    "no tensor": ((3.5,), {"target": Y}, TypeError, "must hold a tensor, got float"),
    "nothing": ((None,), {"target": Y}, TypeError, "must hold a tensor, got NoneType"),
    "no dimension": ((torch.tensor(1.0),), {"target": Y}, ValueError, "without a batch dimension"),
    "no samples": ((X[:0],), {"target": Y[:0]}, ValueError, "no samples"),
    "unlike target": ((X,), {"target": Y[:5]}, ValueError, "target has 5 samples where the input has 6"),
    "unlike nested target": ((X,), {"target": {"a": Y, "b": Y[:2]}}, ValueError, "2 samples .* 6"),
    "unlike inputs": (((X, X[:3]),), {"target": Y}, ValueError, "3 samples where the input has 6"),
}


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_wrong_arguments_of_a_step_and_a_forward(case):
    arguments, given, kind, message = WRONG_STEPS[case]
    keywords, model = dict(given), network()
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss()) as pipe:
        with pytest.raises(kind, match=message):
            pipe.step(*arguments, **keywords)
        if "unlike target" not in case and "nested" not in case:
            del keywords["target"]
            with pytest.raises(kind, match=message):
                pipe(*arguments, **keywords)
        assert_untouched(model)
        pipe.step(X, target=Y)


@pytest.mark.parametrize("model", [nn.ModuleList([nn.Linear(4, 4)]), "a string"], ids=["list", "no module"])
@pytest.mark.parametrize("where", ["profile", "auto", "pipeline"])
def test_models_that_cannot_be_called(model, where):
    plan = plan_by_hand(["0"], [], micro_batches=2)
    call: dict[str, Callable[[], Any]] = {
        "profile": lambda: pipepart.profile(model, X),
        "auto": lambda: Pipeline.auto(model, X, target=Y, loss_fn=nn.MSELoss(), devices=1),
        "pipeline": lambda: Pipeline(model, plan, loss_fn=nn.MSELoss()),
    }
    with pytest.raises(TypeError, match=r"nn\.Module|has no forward"):
        call[where]()


def test_a_plan_by_hand_of_a_model_that_is_recorded():
    with pytest.raises(ValueError, match="does not say what the layers of a Linear are"):
        Pipeline(nn.Linear(4, 4), plan_by_hand(["0"], [], micro_batches=2), loss_fn=nn.MSELoss())


@pytest.mark.parametrize("devices", [0, -1, True, 2.5, "two"])
def test_devices_that_are_none(devices):
    model = network()
    with pytest.raises((TypeError, ValueError), match=re.escape(repr(devices))):
        Pipeline.auto(model, X, target=Y, loss_fn=nn.MSELoss(), devices=devices)
    assert_untouched(model)


@pytest.mark.parametrize("count", [0, -2, 1.5, True, "many", []])
def test_numbers_of_micro_batches_below_one(count):
    model = network()
    with pytest.raises((TypeError, ValueError), match=re.escape(repr(count))):
        Pipeline.auto(model, X, target=Y, loss_fn=nn.MSELoss(), micro_batches=count)
    assert_untouched(model)


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda output, target: ((output - target) ** 2).mean(dim=1), r"a tensor of shape \[2"),
        (lambda output, target: 1.5, "a float"),
        (lambda output, target: None, "a NoneType"),
    ],
    ids=["vector", "float", "none"],
)
def test_losses_that_turn_out_to_be_no_scalar(loss_fn, got):
    model = network()
    with cut_by_hand(model, [2], loss_fn=loss_fn) as pipe:
        with pytest.raises(ValueError, match=f"must be a scalar tensor, got {got}"):
            pipe.step(X, target=Y)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_a_loss_of_its_own_needs_one():
    with (
        cut_by_hand(network(), [2]) as pipe,
        pytest.raises(ValueError, match=r"no loss_fn is given, .* It returned a tensor of shape \[2, 2\]"),
    ):
        pipe.step(X)


def test_a_plan_for_another_model():
    plan = plan_by_hand(["0", "1", "9"], [1], micro_batches=2)
    model = network()
    with pytest.raises(ValueError, match=r"leaves out layers '2', '3'; the model has no layers '9'"):
        Pipeline(model, plan, loss_fn=nn.MSELoss())
    with pytest.raises(ValueError, match="another order"):
        Pipeline(model, plan_by_hand(["0", "2", "1", "3"], [1], micro_batches=2), loss_fn=nn.MSELoss())
    with pytest.raises(ValueError, match="layer '3' is there 2 times"):
        plan_by_hand(["0", "1", "2", "3", "3"], [1], micro_batches=2)
    assert_untouched(model)


def test_plain_mistakes_in_making_a_pipeline_are_told():
    model = network()
    plan = plan_by_hand(["0", "1", "2", "3"], [2], micro_batches=2)
    unchecked: Any = Pipeline
    with pytest.raises(TypeError, match=r"got a str: load it, pipepart\.Plan\.load\('plan\.json'\)"):
        unchecked(model, "plan.json", nn.MSELoss())
    with pytest.raises(TypeError, match=r"loss_fn must be a function, got 'mse'"):
        unchecked(model, plan, "mse")
    with pytest.raises(TypeError, match=r"merge must be a function, got 1"):
        unchecked(model, plan, merge=1)
    for timeout in (float("inf"), 0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="a number of seconds above 0"):
            unchecked(model, plan, timeout=timeout)
    with pytest.raises(ValueError, match=r"whole number of at least 1, got 2\.0"):
        unchecked.auto(model, X, target=Y, loss_fn=nn.MSELoss(), micro_batches=2.0)
    with pytest.raises(TypeError, match="optimizer_state must be the name of an optimizer"):
        unchecked.auto(model, X, target=Y, loss_fn=nn.MSELoss(), optimizer_state=torch.optim.Adam)
    assert_untouched(model)


def test_auto_refuses_wrong_keywords_before_it_measures():
    model = network()
    auto: Any = partial(Pipeline.auto, model, X, target=Y, loss_fn=nn.MSELoss())
    with pytest.raises(TypeError, match=r"Pipeline\.auto\(\) .* 'schedul': did you mean 'schedule'\?"):
        auto(schedul="1f1b")
    with pytest.raises(TypeError, match=r"Pipeline\.auto\(\) .* 'colour'$"):
        auto(colour=1)
    with pytest.raises(TypeError, match=r"got SGD: Pipeline\(\.\.\., optimizer=lambda params: "):
        auto(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert_untouched(model)


@pytest.mark.parametrize(("samples", "parts"), [(5, 2), (4, 2), (3, 1)])
def test_batch_norm_in_training_gets_two_samples_a_micro_batch(samples, parts):
    model = network()
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
        pipe.step(X[:samples], target=Y[:samples])
        assert model[0].calls == parts
        pipe.eval()
        pipe.step(X[:samples], target=Y[:samples])
        assert model[0].calls == parts + min(samples, 4)


def test_memory_that_does_not_suffice_says_so_before_anything_runs():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    with pytest.raises(pipepart.InfeasiblePlanError, match=r"stage \d .* short by \d+ bytes") as caught:
        pipepart.Pipeline.auto(
            model,
            x,
            target=x,
            loss_fn=nn.MSELoss(),
            devices=pipepart.Cluster.virtual(2, memory="10KiB"),
            micro_batches=2,
        )
    assert caught.value.deficit_bytes > 0
    assert model.state_dict()["1.num_batches_tracked"] == 0


def test_a_sequential_without_layers():
    with pytest.raises(ValueError, match="holds no layers"):
        pipepart.profile(nn.Sequential(), X)


def test_a_device_that_is_only_described_runs_nothing():
    plan = plan_by_hand(["0", "1", "2", "3"], [], micro_batches=2)
    stages = (plan.stages[0].model_copy(update={"device": "device:0"}),)
    plan = plan.model_copy(update={"cluster": pipepart.Cluster.parse(["1GiB"]), "stages": stages})
    with pytest.raises(ValueError, match="'device:0' is only described"):
        Pipeline(network(), plan, loss_fn=nn.MSELoss())
