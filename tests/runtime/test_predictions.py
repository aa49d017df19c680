"""Predictions of the runtime: the memory in use at the peak, within 2 %, and the overhead of a step."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Cluster, Pipeline, Profile, measure
from pipepart.profiling import Overhead
from pipepart.runtime import overhead
from tests.support.two_parts import Calls

pytestmark = pytest.mark.usefixtures("short_profiles")


WIDTH, SAMPLES = 128, 2048  # an activation of one of four micro-batches has 256 KiB
CLOSE = 0.02
MSE = nn.MSELoss()


def deep() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


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


def masked() -> nn.Sequential:
    """Has a large buffer, which no forward writes."""
    return nn.Sequential(*deep(), Calls(lambda x, mask: x * mask[:WIDTH], mask=nn.Buffer(torch.ones(2**20))))


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


def check(make: Callable[[], nn.Module], cut: list[str], loss: Any, of_plan: Any, of_pipeline: Any) -> None:
    """Within 2 %, but for two messages: how many wait depends on the times of this very step.

    The traced step follows one that has made all that stays.
    """
    settings = {"recompute": "never", "micro_batches": 4, "allow_split_ties": True, **of_plan}
    cluster = settings.pop("cluster", None) or Cluster.virtual(2, threads=1)
    profile = profiled(make, loss, settings["micro_batches"], settings.pop("optimizer", "sgd"))
    plan = pipepart.plan(profile, cluster, cut_before=cut, **settings)
    x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    with Pipeline(make(), plan, loss, strict=True, **of_pipeline) as pipe:
        pipe.step(x, target=y)
        with pipe.trace(memory=True) as trace:
            pipe.step(x, target=y)
    assert trace.memory_bytes.keys() == {device.name for device in plan.cluster.devices}
    message = max(stage.output_bytes for stage in plan.stages)
    for name, predicted in plan.device_bytes().items():
        assert trace.memory_bytes[name] == pytest.approx(predicted, abs=CLOSE * predicted + 2 * message)


ADAM = {"optimizer": torch.optim.Adam}
SGD = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01)}
FOUR = Cluster.virtual(4, threads=1)
EIGHT = {"micro_batches": 8}
CUT, CHUNKS = ["8"], ["4", "8", "12"]

# A model, its cut, its loss, and settings of the plan and of the pipeline.
Case = tuple[Callable[[], nn.Module], list[str], Any, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "gpipe, recomputed": (deep, CUT, MSE, {"schedule": "gpipe", "recompute": "always"}, {}),
    "1f1b, all but the last": (deep, CUT, MSE, {"schedule": "1f1b", "recompute": "except-last"}, {}),
    "zb-h1": (deep, CUT, MSE, {"schedule": "zb-h1"}, {}),
    "chimera": (deep, CUT, MSE, {"schedule": "chimera"}, {}),
    "v-half": (deep, CHUNKS, MSE, {"schedule": "v-half"}, {}),
    "constants": (masked, CUT, MSE, {"schedule": "gpipe", "recompute": "always"}, {}),
    "tied": (tied, CUT, MSE, {"schedule": "1f1b"}, {"reduction": "mean"}),
    "versions of weights": (deep, CUT, MSE, {**EIGHT, "schedule": "pipedream"}, SGD),
    "gradients of a replica": (deep, CUT, MSE, {**EIGHT, "cluster": FOUR, "schedule": "zb-h1", "replicas": 2}, {}),
    "state of an optimizer": (deep, CUT, MSE, {"optimizer": "adam", "schedule": "1f1b"}, ADAM),
    "offloaded": (deep, CUT, MSE, {**EIGHT, "schedule": "zb-h1", "offload": "stash"}, {}),
}  # fmt: skip
SLOW: dict[str, Case] = {
    "gpipe": (deep, CUT, MSE, {"schedule": "gpipe"}, {}),
    "interleaved-1f1b": (deep, CHUNKS, MSE, {"schedule": "interleaved-1f1b"}, {}),
    "chimera, recomputed": (deep, CUT, MSE, {"schedule": "chimera", "recompute": "always"}, {}),
    "frozen": (frozen, CUT, MSE, {"schedule": "1f1b"}, {}),
    "residual": (residual, ["3"], classified, {"schedule": "1f1b"}, {"reduction": "mean"}),
    "versions of weights, twice": (deep, CUT, MSE, {**EIGHT, "schedule": "pipedream-2bw"}, SGD),
    # Three other replicas have theirs earlier or later: the first has no room for them while it computes.
    "the first of four replicas": (deep, [], MSE, {"cluster": FOUR, "schedule": "gpipe", "replicas": 4}, {}),
    # It has a gradient from the later stage, and is not deferred.
    "tied and recorded": (Tied, ["blocks.2"], MSE, {**EIGHT, "schedule": "zb-h1"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_device_has_in_use_what_is_predicted(case):
    check(*(CASES | SLOW)[case])


@pytest.mark.slow
def test_autocast_of_a_recorded_model():
    """The recording casts weights outside of all devices; autocast caches these casts for the whole block."""
    with torch.autocast("cpu", torch.bfloat16):
        check(Tied, ["blocks.2"], MSE, {"schedule": "1f1b"}, {})


def test_gaps_between_spans_are_actions_and_messages():
    """A gap from B to F of one layer is an action; one between layers is an action and a message."""

    def step(action: float, message: float) -> list[overhead.Span]:
        at, spans = 0.0, []
        for layer, kind, gap in (
            (0, "F", 0.0),
            (1, "F", action + message),
            (1, "B", 50.0),  # the loss
            (0, "B", action + message),
            (0, "F", action),
            (1, "F", action + message),
        ):
            at += gap
            spans.append((layer, kind, at, at + 1))
            at += 1
        return spans

    steps = [step(2.0, 3.0), step(2.0, 3.0), step(40.0, 400.0)]  # a disturbed step does not count
    seconds = [spans[-1][3] + 6.0 for spans in steps]  # 6 s before the first action and after the last
    expected = Overhead(action_seconds=2.0, message_seconds=3.0, step_seconds=4.0)
    assert overhead._overhead(steps, seconds) == expected


def test_it_is_measured_once_by_a_pipeline_of_two_workers_and_leaves_no_trace():
    overhead.measured_overhead.cache_clear()
    state = torch.get_rng_state()
    with torch.no_grad(), torch.device("meta"):  # modes of the caller do not count
        found = overhead.measured_overhead()
    assert found.action_seconds > 0
    assert found.step_seconds > 0
    assert found.devices == 1
    assert overhead.measured_overhead() is found
    assert torch.equal(torch.get_rng_state(), state)


def test_a_measured_profile_has_it(monkeypatch: pytest.MonkeyPatch):
    runtime = Overhead(action_seconds=1.5, message_seconds=0.5, step_seconds=0.25)
    monkeypatch.setattr(measure, "measured_overhead", lambda: runtime)
    found = pipepart.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), seconds=0, devices=1).overhead
    assert found == runtime.model_copy(update={"cores": found.cores})
