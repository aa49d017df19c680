"""The memory that a plan predicts is what strict devices have in use at their peak, within 2 %."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Cluster, Pipeline, Plan, Profile

pytestmark = pytest.mark.usefixtures("short_profiles")

WIDTH, SAMPLES = 128, 2048  # an activation of one of four micro-batches has 256 KiB
CLOSE = 0.02
MSE = nn.MSELoss()


def deep() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def normalized() -> nn.Sequential:
    """Layers with buffers, of which some save their input and others their output."""
    return nn.Sequential(
        *[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())]
    )


def tied() -> nn.Sequential:
    """The first and the last weight are one parameter, of which each stage has a copy."""
    model = deep()
    model[14].weight = model[0].weight
    return model


def frozen() -> nn.Sequential:
    model = deep()
    model[:6].requires_grad_(False)
    return model


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


def residual() -> nn.Sequential:
    return nn.Sequential(*[Residual() for _ in range(6)])


def classified(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target.argmax(dim=1))


class Tied(nn.Module):
    """A recorded model whose last layer has the weight of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@functools.cache
def profiled(make: Callable[[], nn.Module], loss: Any, count: int, optimizer: str) -> Profile:
    x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    return pipepart.profile(
        make(), x, target=y, loss_fn=loss, micro_batches=count, seconds=0, threads=1, optimizer=optimizer
    )


def planned(
    make: Callable[[], nn.Module],
    cut: list[str],
    loss: Any,
    cluster: Cluster | None = None,
    optimizer: str = "sgd",
    micro_batches: int = 4,
    **settings: Any,
) -> Plan:
    settings = {"recompute": "never", "cut_before": cut, "micro_batches": micro_batches, **settings}
    profile = profiled(make, loss, micro_batches, optimizer)
    return pipepart.plan(profile, cluster or Cluster.virtual(2, threads=1), **settings)


def measured(plan: Plan, model: nn.Module, loss: Any, **settings: Any) -> Any:
    """A trace of one step, after one that has made all that stays."""
    x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    with Pipeline(model, plan, loss, strict=True, **settings) as pipe:
        pipe.step(x, target=y)
        with pipe.trace(memory=True) as trace:
            pipe.step(x, target=y)
    return trace


def check(plan: Plan, trace: Any) -> None:
    """Within 2 %, but for two messages: how many wait depends on the times of this very step."""
    assert set(trace.memory_bytes) == {device.name for device in plan.cluster.devices}
    message = max(stage.output_bytes for stage in plan.stages)
    for name, predicted in plan.device_bytes().items():
        assert trace.memory_bytes[name] == pytest.approx(predicted, abs=CLOSE * predicted + 2 * message)


CUT, CHUNKS = ["8"], ["4", "8", "12"]


@pytest.mark.parametrize(
    ("schedule", "cut", "recompute"),
    [
        ("gpipe", CUT, "always"),
        ("1f1b", CUT, "except-last"),
        ("zb-h1", CUT, "never"),
        ("chimera", CUT, "never"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpipe", CUT, "never"),
                ("v-half", CHUNKS, "never"),
                ("1f1b", CUT, "never"),
                ("interleaved-1f1b", CHUNKS, "never"),
                ("chimera", CUT, "always"),
            )
        ),
    ],
)
def test_a_device_has_what_its_schedule_keeps(schedule, cut, recompute):
    plan = planned(deep, cut, MSE, schedule=schedule, recompute=recompute)
    check(plan, measured(plan, deep(), MSE))


@pytest.mark.parametrize(
    ("make", "cut", "loss"),
    [
        (tied, CUT, MSE),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((normalized, ["12"], MSE), (frozen, CUT, MSE), (residual, ["3"], classified))
        ),
    ],
)
def test_a_device_has_what_its_layers_keep(make, cut, loss):
    plan = planned(make, cut, loss, schedule="1f1b", allow_split_ties=True)
    check(plan, measured(plan, make(), loss, reduction="mean"))


@pytest.mark.parametrize("schedule", ["pipedream", pytest.param("pipedream-2bw", marks=pytest.mark.slow)])
def test_a_device_has_the_versions_of_its_weights_and_gradients_from_its_first_backward_on(schedule):
    plan = planned(deep, CUT, MSE, schedule=schedule, micro_batches=8)
    check(plan, measured(plan, deep(), MSE, optimizer=sgd))


def test_a_further_replica_has_gradients_from_its_first_backward_on():
    cluster = Cluster.virtual(4, threads=1)
    plan = planned(deep, CUT, MSE, cluster, schedule="zb-h1", replicas=2, micro_batches=8)
    check(plan, measured(plan, deep(), MSE))


@pytest.mark.slow
def test_the_first_replica_fetches_gradients_when_its_own_are_complete():
    """Three others have theirs earlier or later: the first has no room for them while it computes."""
    cluster = Cluster.virtual(4, threads=1)
    plan = planned(deep, [], MSE, cluster, schedule="gpipe", replicas=4)
    check(plan, measured(plan, deep(), MSE))


@pytest.mark.slow
def test_a_tied_weight_has_a_gradient_from_the_later_stage_and_is_not_deferred():
    plan = planned(Tied, ["blocks.2"], MSE, schedule="zb-h1", allow_split_ties=True, micro_batches=8)
    check(plan, measured(plan, Tied(), MSE))


def test_a_device_has_the_state_of_its_optimizer():
    plan = planned(deep, CUT, MSE, optimizer="adam", schedule="1f1b")
    check(plan, measured(plan, deep(), MSE, optimizer=adam))


def test_a_device_has_little_of_what_it_offloads():
    plan = planned(deep, CUT, MSE, schedule="zb-h1", offload="stash", micro_batches=8)
    check(plan, measured(plan, deep(), MSE))


@pytest.mark.slow
def test_a_device_that_is_named_twice_counts_as_two():
    cluster = Cluster.of(["cpu", "cpu"])
    plan = planned(deep, CUT, MSE, cluster, schedule="1f1b")
    check(plan, measured(plan, deep(), MSE))


@pytest.mark.slow
def test_autocast_of_a_recorded_model():
    """The recording casts weights outside of all devices; autocast caches these casts for the whole block."""
    with torch.autocast("cpu", torch.bfloat16):
        plan = planned(Tied, ["blocks.2"], MSE, schedule="1f1b", allow_split_ties=True)
        check(plan, measured(plan, Tied(), MSE))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)
