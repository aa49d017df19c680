"""Steps run at the moments that were predicted, on clocks that only layers and emulated links move.

Each worker has a clock of its own. A message brings the time of its arrival, and its receiver's clock goes on to that.
So moments are exact and do not depend on the machine.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Cluster, Link, Pipeline, Plan, Profile
from pipepart.cluster import PairLink
from pipepart.emulation import DeviceEmulation, emulation, transport
from pipepart.planning.compression import compress_links
from pipepart.planning.plans import stage_plan
from pipepart.profiling import Costs, Overhead, Timing
from pipepart.runtime.observe import recorder
from schedules import Kind, Timeline
from tests.support.chains import plan_by_hand
from tests.support.searched import drawn_plan
from tests.support.seeds import seeds

pytestmark = pytest.mark.usefixtures("short_profiles")

WIDTH = 16


class Time(threading.local):
    """The clock of each thread; begins at 0 s."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


TIME = Time()


class Work(torch.autograd.Function):
    """Takes some seconds in its forward, and others in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        TIME.sleep(forward_seconds)
        # The layer that uses the output saves it. Of the first layer that is the model's input, as profiles assume.
        return x.clone() if ctx.needs_input_grad[0] else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        TIME.sleep(ctx.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    """Takes the seconds that it is made with: of a forward, and of a backward for its input and for its weight."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.forward_seconds, self.input_seconds, self.weight_seconds = (choose.uniform(1, 9) for _ in "fiw")
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Work.apply(x, self.forward_seconds, self.input_seconds))


class Woven(nn.Module):
    """Layers, of which some also take the outputs of earlier ones."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(choose) for _ in range(choose.randint(3, 9)))
        self.skips = [sorted(choose.sample(range(len(self.layers)), 2)) for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = x + sum(made[source] for source, target in self.skips if target == index)
            made.append(x := layer(x))
        return x


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = DeviceEmulation.computing

    @contextmanager
    def with_weights(self: DeviceEmulation, kind: Kind, stage: int) -> Iterator[None]:
        with computing(self, kind, stage):
            yield
            if kind in (Kind.B, Kind.W):
                own = (layer for _, part in self._stages[stage].layers for layer in part.modules())
                TIME.sleep(sum(layer.weight_seconds for layer in own if isinstance(layer, Layer)))

    monkeypatch.setattr(DeviceEmulation, "computing", with_weights)
    monkeypatch.setattr(emulation, "HOST_CLOCK", transport.Clock(lambda: TIME.now, TIME.sleep))
    monkeypatch.setattr(recorder, "_now", lambda: TIME.now)
    monkeypatch.setattr(stage_plan, "_VIRTUAL_COPY_BANDWIDTH", math.inf)


def profile_of(model: nn.Module, layers: list[Layer], micro_batches: int) -> Profile:
    x = torch.randn(micro_batches, WIDTH)
    found = pipepart.profile(
        model, x, target=x, loss_fn=nn.MSELoss(), micro_batches=micro_batches, seconds=0.0
    )

    def known(costs: Costs) -> Costs:
        changed = [
            cost.model_copy(
                update={
                    "forward": Timing(seconds=layer.forward_seconds),
                    # Nothing wants the gradient of the model's input.
                    "backward_input": Timing(seconds=layer.input_seconds if index else 0.0),
                    "backward_weight": Timing(seconds=layer.weight_seconds),
                    "split_seconds": 0.0,
                }
            )
            for index, (cost, layer) in enumerate(zip(costs.layers, layers, strict=True))
        ]
        none = {"forward": Timing(), "backward_input": Timing(), "backward_weight": Timing()}
        return costs.model_copy(update={"layers": tuple(changed), "loss": costs.loss.model_copy(update=none)})

    return found.model_copy(update={"costs": tuple(map(known, found.costs)), "overhead": Overhead()})


def drawn(seed: int, skipping: bool, compress: str | None = None) -> tuple[nn.Module, Plan]:
    """A model and a plan for it on emulated devices, all drawn."""
    choose = random.Random(seed)
    woven = Woven(choose)
    layers: list[Layer] = list(woven.layers)  # type: ignore[arg-type]
    model = woven if skipping else nn.Sequential(*layers)
    names = [f"layers.{index}" if skipping else str(index) for index in range(len(layers))]
    plan = drawn_plan(choose, names)
    count = len(plan.cluster)
    cluster = Cluster.virtual(
        count,
        threads=1,
        speed=[choose.choice([1, 0.5, 0.25]) for _ in range(count)],
        link=choose.choice([None, "10B/s", "30B/s"]),
        latency=choose.choice([0.25, 1.0, 3.0]),
        host_link=choose.choice([None, "20B/s", "100B/s"]),
    )
    pair = PairLink(between=("virtual:0", "virtual:1"), bandwidth=choose.choice([5.0, 50.0]))
    own_links = {"links": (pair,)} if count > 1 and choose.random() < 0.5 else {}
    # The clocks do not count what is not emulated.
    cluster = cluster.model_copy(update={**own_links, "message_seconds": 0.0})
    profile = profile_of(model, layers, plan.micro_batches)
    cluster = compress_links(cluster, compress, profile)
    if cluster.link.compress:  # nor what compression takes
        free = cluster.link.compress.model_copy(update={"conversion_seconds": 0.0})
        cluster = cluster.model_copy(update={"link": cluster.link.model_copy(update={"compress": free})})
    changed = {"cluster": cluster, "profile": profile}
    return model, plan.model_copy(update=changed).predict()


def check(seed: int, skipping: bool, compress: str | None = None) -> None:
    model, plan = drawn(seed, skipping, compress)
    x = torch.randn(plan.micro_batches, WIDTH)
    with Pipeline(model, plan, nn.MSELoss(), trace=True) as pipe:
        pipe.step(x, target=x)
        trace = pipe.last_trace
    assert trace is not None
    predicted = plan.simulate()
    assert moments(trace) == pytest.approx(moments(predicted))


def moments(timeline: Timeline) -> dict[str, float]:
    """When each action ends."""
    return {
        str(action): end
        for row, ends in zip(timeline.schedule.actions, timeline.ends, strict=True)
        for action, end in zip(row, ends, strict=True)
    }


@pytest.mark.parametrize("skipping", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_actions_end_when_predicted(seed, skipping):
    """Under any placement and order, on unlike devices whose links carry one message at a time in each direction."""
    check(seed, skipping)


@pytest.mark.parametrize(("seed", "compress", "skipping"), [(10, "bf16", True), (11, "int8", False)])
def test_compressed_messages_take_what_their_bytes_take(seed, compress, skipping):
    check(seed, skipping, compress)


def test_a_link_carries_one_message_at_a_time_in_each_direction():
    arrivals: list[float] = []

    link = Link(bandwidth=100.0, latency=0.5)
    sent: Any = SimpleNamespace(send=lambda *given: arrivals.append(given[-1][1]))
    over = transport.EmulatedTransport(sent, (0, 1), [[link] * 2] * 2, transport.Clock(lambda: 0.0), 0.0)
    for sender, receiver in ((0, 1), (0, 1), (1, 0)):
        over.send(sender, receiver, (Kind.F, receiver, 0), torch.zeros(50))
    assert arrivals == [2.5, 4.5, 2.5]


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.virtual(2),  # whose messages take what threads need anyway
        Cluster.virtual(2).model_copy(update={"link": Link(bandwidth=1.0, latency=5.0)}),
    ],
    ids=["not said", "described"],
)
def test_nothing_is_emulated_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, cluster: Cluster):
    """As of a cluster of real devices, or of one that measured runs have refined."""
    slept: list[float] = []
    monkeypatch.setattr(emulation, "HOST_CLOCK", transport.Clock(lambda: 0.0, slept.append))
    plan = plan_by_hand(["0", "1"], [1], micro_batches=4).model_copy(update={"cluster": cluster})
    with Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan, nn.MSELoss()) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert slept == []


@pytest.mark.slow
@pytest.mark.parametrize("skipping", [False, True])
def test_actions_of_many_plans_end_when_predicted(skipping):
    for number, seed in enumerate(seeds(30, f"virtual time {skipping}")):
        check(seed, skipping, None if skipping else (None, "bf16", "int8")[number % 3])
