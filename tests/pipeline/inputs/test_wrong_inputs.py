"""What cannot run is refused before anything has run, and says which values are wrong; arguments of the first layer."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Arguments, Pipeline
from tests.pipeline.conformance.scenarios import embedded
from tests.support.chains import cut_by_hand, plan_by_hand

pytestmark = pytest.mark.usefixtures("short_profiles")

LOSS = nn.MSELoss()
X, Y = torch.randn(6, 4), torch.randn(6, 2)
PLAN = plan_by_hand(["0", "1", "2", "3"], [2], micro_batches=2)


class Counted(nn.Module):
    """Counts its calls with real tensors."""

    calls = 0

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


WRONG_STEPS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": ((3.5,), {"target": Y}, TypeError, "must hold a tensor, got float"),
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
    with cut_by_hand(model, [2], loss_fn=LOSS) as pipe:
        with pytest.raises(kind, match=message):
            pipe.step(*arguments, **keywords)
        if "unlike target" not in case and "nested" not in case:
            del keywords["target"]
            with pytest.raises(kind, match=message):
                pipe(*arguments, **keywords)
        assert_untouched(model)
        pipe.step(X, target=Y)


IDS = torch.randint(9, (7, 3))
WRONG_ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "none": ((), {}, "0 positional arguments: missing a required argument: 'ids'"),
    "three": ((IDS, IDS, IDS), {"target": IDS}, "3 positional arguments: too many positional arguments"),
    "target by place": ((IDS, IDS, IDS), {}, r"3 positional arguments.*by its name: target="),
    "unknown": ((IDS,), {"masks": IDS}, "1 positional arguments and the keywords masks: .* 'masks'"),
    "twice": ((IDS,), {"ids": IDS}, "multiple values for argument 'ids'"),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_arguments_that_the_first_layer_does_not_take_are_refused_before_anything_runs(case):
    args, kwargs, message = WRONG_ARGUMENTS[case]
    model = embedded()
    ran = []
    model[1].register_forward_hook(lambda *_: ran.append(1))
    sample = Arguments(*args, **{name: value for name, value in kwargs.items() if name != "target"})
    with cut_by_hand(model, [1], loss_fn=LOSS) as pipe:
        entrances: list[Callable[[], Any]] = [
            lambda: pipe.step(*args, **kwargs),
            lambda: pipepart.profile(model, sample),
            lambda: Pipeline.auto(model, sample),
            lambda: pipepart.check(model, sample),
        ]
        if "target" not in kwargs:
            entrances.append(lambda: pipe(*args, **kwargs))
        for entrance in entrances:
            with pytest.raises(TypeError, match=rf"first layer '0' \(Embeds\) takes \(ids.*{message}"):
                entrance()
    assert not ran


def test_a_model_whose_argument_is_a_dict_says_how_a_sample_is_given():
    class OfOneBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](batch["x"]))

    batch = {"x": torch.randn(4, 3)}
    with pytest.raises(TypeError, match=r"missing a required argument: 'batch'.* the sample is \(dict,\)"):
        pipepart.profile(OfOneBatch(), batch, seconds=0)
    assert len(pipepart.profile(OfOneBatch(), (batch,), seconds=0).layers) == 2
    with pytest.raises(TypeError, match=r"key 3.*pipepart\.Arguments\(sample\)"):
        Arguments.of({3: IDS})
    assert Arguments.of(Arguments({3: IDS})).input == {3: IDS}


def auto(model: Any = None, sample: Any = X, **options: Any) -> Pipeline:
    return Pipeline.auto(model or network(), sample, target=Y, loss_fn=LOSS, **options)


def of_layers(*names: str) -> Callable[[nn.Module], Any]:
    return lambda model: Pipeline(model, plan_by_hand(names, [1], micro_batches=2), LOSS)


def described(model: nn.Module) -> Pipeline:
    """On a device that is described only."""
    stages = (PLAN.stages[0].model_copy(update={"device": "device:0", "layers": tuple("0123")}),)
    cluster = pipepart.Cluster.parse(["1GiB"])
    return Pipeline(model, PLAN.model_copy(update={"cluster": cluster, "stages": stages}), LOSS)


def with_chunks(model: nn.Module) -> Pipeline:
    """A copy of a plan, which pydantic does not check, in which two stages of a device are on two devices."""
    plan = plan_by_hand("0123", [1, 2, 3], micro_batches=4)
    copied = plan.model_copy(update={"schedule": "interleaved-1f1b", "chunks": 2})
    return Pipeline(model, copied, LOSS)


UNCHECKED: Any = Pipeline
NOT_CALLED: list[Any] = [nn.ModuleList([nn.Linear(4, 4)]), "a string"]
MISTAKES: list[tuple[Callable[[nn.Module], Any], Any, str]] = [
    *(
        (lambda _, make=make, model=model: make(model), TypeError, r"nn\.Module|has no forward")
        for make in (
            lambda model: pipepart.profile(model, X),
            auto,
            lambda model: UNCHECKED(model, PLAN, LOSS),
        )
        for model in NOT_CALLED
    ),
    *(
        (partial(auto, **{keyword: value}), (TypeError, ValueError), re.escape(repr(value)))
        for keyword, values in (("devices", (0, True, "two")), ("micro_batches", (0, 2.0, "many")))
        for value in values
    ),
    (
        lambda _: auto(devices=pipepart.Cluster.virtual(2, memory="200B")),
        pipepart.InfeasiblePlanError,
        r"stage \d .* short by \d+ bytes",
    ),
    (of_layers("0", "1", "9"), ValueError, r"leaves out layers '2', '3'; the model has no layers '9'"),
    (of_layers("0", "2", "1", "3"), ValueError, "another order"),
    (of_layers("0", "1", "2", "3", "3"), ValueError, "layer '3' is there 2 times"),
    (lambda model: Pipeline(model[1], PLAN), ValueError, "does not say what the layers of a Linear are"),  # type: ignore[index]
    (described, ValueError, "'device:0' is only described"),
    (
        with_chunks,
        ValueError,
        "stage 2 is on 'virtual:2': .* runs it beside stage 0, which is on 'virtual:0'",
    ),
    (lambda _: pipepart.profile(nn.Sequential(), X), ValueError, "holds no layers"),
    (
        lambda model: UNCHECKED(model, "plan.json", LOSS),
        TypeError,
        r"got a str: load it, pipepart\.Plan\.load\('plan\.json'\)",
    ),
    (lambda model: UNCHECKED(model, PLAN, "mse"), TypeError, r"loss_fn must be a function, got 'mse'"),
    *(
        (
            lambda model, timeout=timeout: UNCHECKED(model, PLAN, timeout=timeout),
            ValueError,
            "a number of seconds above 0",
        )
        for timeout in (0, float("nan"), "1")
    ),
    (partial(auto, schedule="pipedream", sample=None), ValueError, "'pipedream' is asynchronous"),
    (partial(auto, schedul="1f1b"), TypeError, r"Pipeline\.auto\(\) .* 'schedul': did you mean 'schedule'\?"),
    (
        lambda model: auto(model, optimizer=torch.optim.SGD([X], lr=0.1)),
        TypeError,
        r"got SGD: Pipeline\(\.\.\., optimizer=lambda params: ",
    ),
]


@pytest.mark.parametrize(("make", "kind", "says"), MISTAKES)
def test_mistakes_in_making_a_pipeline_are_told_before_anything_is_measured(make, kind, says):
    model = network()
    with pytest.raises(kind, match=says):
        make(model)
    assert_untouched(model)


@pytest.mark.parametrize(("samples", "parts"), [(5, 2), (4, 2), (3, 1)])
def test_batch_norm_in_training_gets_two_samples_a_micro_batch(samples, parts):
    model = network()
    with cut_by_hand(model, [2], loss_fn=LOSS, micro_batches=4) as pipe:
        pipe.step(X[:samples], target=Y[:samples])
        assert model[0].calls == parts
        pipe.eval()
        pipe.step(X[:samples], target=Y[:samples])
        assert model[0].calls == parts + min(samples, 4)
