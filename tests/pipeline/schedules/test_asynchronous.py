"""PipeDream and PipeDream-2BW: each micro-batch keeps to the weights of its forward, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.delayed import DelayedTraining, OptimizerFactory, batches, borders_of
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
LOSS = nn.MSELoss()
CASES = [
    ("pipedream", 2, "adam", "always"),
    ("pipedream", 3, "momentum", "never"),
    ("pipedream", 4, "adam", "never"),
    ("pipedream-2bw", 2, "momentum", "never"),
    ("pipedream-2bw", 3, "adam", "always"),
]


def chain(stages: int) -> nn.Sequential:
    torch.manual_seed(stages)
    pairs = ((nn.Linear(5, 5), nn.Tanh() if stage % 2 else nn.LayerNorm(5)) for stage in range(stages))
    return plain.in_double(layer for pair in pairs for layer in pair)


def pipeline(
    model: nn.Sequential, schedule: str, optimizer: Any = OPTIMIZERS["momentum"], **how: Any
) -> Pipeline:
    """Two layers a stage."""
    how = {"loss_fn": LOSS, "micro_batches": 12, "schedule": schedule, "optimizer": optimizer, **how}
    return cut_by_hand(model, borders_of(len(model) // 2), **how)


@pytest.mark.parametrize(("schedule", "stages", "optimizer", "recompute"), CASES)
def test_weights_and_losses_are_those_of_delayed_updates(schedule, stages, optimizer, recompute):
    model = chain(stages)
    oracle = DelayedTraining(copy.deepcopy(model), stages, schedule, OPTIMIZERS[optimizer])
    with pipeline(model, schedule, OPTIMIZERS[optimizer], recompute=recompute) as pipe:
        for x, y in batches(2, samples=24):
            ours, theirs = pipe.step(x, target=y), oracle.step(x, y, LOSS, 12)
            assert ours.equal(theirs)
            assert_weights(model, oracle)


def assert_weights(model: nn.Module, oracle: DelayedTraining) -> None:
    theirs = [parameter for stage in oracle.stages for parameter in stage.parameters()]
    for (name, ours), expected in zip(model.named_parameters(), theirs, strict=True):
        assert ours.equal(expected), name


def test_a_mean_over_targets_counts_those_of_the_optimizer_step():
    model, loss_fn = chain(2), nn.CrossEntropyLoss(ignore_index=-1)
    oracle = DelayedTraining(copy.deepcopy(model), 2, "pipedream-2bw", OPTIMIZERS["momentum"])
    x, y = torch.randn(8, 5, dtype=torch.double), torch.tensor([0, 1, -1, -1, -1, 2, 3, 4])
    with pipeline(model, "pipedream-2bw", micro_batches=4, loss_fn=loss_fn) as pipe:
        for _ in range(2):
            ours = pipe.step(x, target=y)
            theirs = oracle.step(x, y, _ZeroForNone(loss_fn), 4, weigh=lambda part: int((part >= 0).sum()))
            assert ours.equal(theirs)
    assert_weights(model, oracle)


class _ZeroForNone(nn.Module):
    """A loss that is 0 where all targets are ignored, with gradients that are, too."""

    def __init__(self, loss_fn: nn.Module) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * 0).sum() if bool((target < 0).all()) else self.loss_fn(output, target)


def test_parameters_keep_their_memory_and_hooks_and_a_graph_of_the_caller_notices_the_writes():
    model = chain(3)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    seen: list[float] = []
    next(model.parameters()).register_hook(lambda gradient: seen.append(float(gradient.norm())))
    ((x, y),) = batches(1, samples=12)
    outside = model(x.clone().requires_grad_()).sum()
    with pipeline(model, "pipedream") as pipe:
        pipe.step(x, target=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outside.backward()
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert len(seen) == 12


def test_after_a_failure_each_stage_has_the_newest_weights_it_made_and_trains_on():
    model = chain(3)
    fine = copy.deepcopy(model)
    calls = iter(range(100))

    def fail(x: torch.Tensor) -> torch.Tensor:
        if next(calls) == 5:
            raise ArithmeticError("no more")
        return x

    model[5], fine[5] = Calls(fail), nn.Identity()
    oracle = DelayedTraining(fine, 3, "pipedream", OPTIMIZERS["momentum"])
    (x, y), again = batches(2, samples=12)
    oracle.step(x, y, LOSS, 12)
    with pipeline(model, "pipedream") as pipe:
        with pytest.raises(ArithmeticError, match="no more"):
            pipe.step(x, target=y)
        weights = [model.get_parameter(f"{layer}.weight") for layer in (0, 2, 4)]
        taken = [
            [next(iter(version.values())).equal(weight) for version in versions]
            for weight, versions in zip(weights, oracle.versions, strict=True)
        ]
        assert taken[2].index(True) == 5
        assert all(any(found[:6]) for found in taken)
        assert bool(pipe.step(again[0], target=again[1]).isfinite())


def test_what_an_asynchronous_schedule_cannot_train_is_refused():
    model = chain(2)
    with pytest.raises(ValueError, match=r"'pipedream' is asynchronous.*optimizer=lambda params"):
        pipeline(model, "pipedream", None)
    with (
        pipeline(model, "pipedream-2bw", micro_batches=4) as pipe,
        pytest.raises(ValueError, match="3 is no multiple of that; 2 or 4 is"),
    ):
        pipe.step(torch.randn(3, 5).double(), target=torch.randn(3, 5).double())
    model[2].weight = model[0].weight
    with pytest.raises(
        ValueError, match=r"'0.weight' is shared by layers of stages 0, 1.*put these layers in"
    ):
        pipeline(model, "pipedream")
