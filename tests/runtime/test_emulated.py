"""Emulated speeds and links: who waits for how long, on a clock that stands still unless a test moves it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
import schedules
from pipepart import Cluster, Link, Pipeline, Plan
from pipepart.cluster import VIRTUAL_LATENCY_SECONDS, PairLink
from pipepart.runtime.emulation import DeviceEmulation, emulation
from pipepart.runtime.emulation.transport import Clock
from pipepart.runtime.transport.threads import ThreadTransport, Transport
from schedules import Kind
from tests.support import plain
from tests.support.chains import plan_by_hand


class Time:
    """A clock that only sleeping and a test move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.clock = Clock(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def plan_on(cluster: Cluster, schedule: str = "gpipe") -> Plan:
    names = [str(index) for index in range(len(cluster))]
    plan = plan_by_hand(names, range(1, len(cluster)), micro_batches=4, schedule=schedule)
    return plan.model_copy(update={"cluster": cluster})


def emulated(plan: Plan, time: Time) -> DeviceEmulation:
    return DeviceEmulation(plan, (), None, strict=False, clock=time.clock)


@pytest.mark.parametrize(("stage", "speed"), [(0, 1.0), (1, 0.5), (2, 0.25)])
def test_an_action_takes_as_long_as_on_a_device_of_that_speed(stage, speed):
    time = Time()
    cluster = Cluster.virtual(3, speed=[1, 0.5, 0.25])
    with emulated(plan_on(cluster), time).computing(Kind.F, stage):
        time.now += 3.0
    assert time.now == pytest.approx(3.0 / speed)
    assert time.slept == ([] if speed == 1 else [pytest.approx(3.0 / speed - 3.0)])


def transport_on(cluster: Cluster, time: Time) -> Transport:
    schedule = schedules.build("gpipe", devices=len(cluster), micro_batches=4)
    return emulated(plan_on(cluster), time).transport(ThreadTransport(schedule), schedule)


def send(
    transport: Transport, sender: int, receiver: int, micro_batches: Sequence[int], floats: int = 250
) -> None:
    for micro_batch in micro_batches:
        transport.send(sender, receiver, (Kind.F, receiver, micro_batch), torch.zeros(floats))


def take(transport: Transport, receiver: int, micro_batch: int) -> Any:
    return transport.recv(receiver, (Kind.F, receiver, micro_batch))


def test_a_message_arrives_after_latency_and_bytes_and_its_sender_goes_on():
    time = Time()
    transport = transport_on(Cluster.virtual(2, link=500.0, latency=0.25), time)
    send(transport, 0, 1, [0])
    assert time.slept == []
    assert take(transport, 1, 0).shape == (250,)
    assert time.slept == [pytest.approx(2.0 + 0.25 - VIRTUAL_LATENCY_SECONDS)]


def test_a_message_that_has_lain_long_enough_is_not_waited_for():
    time = Time()
    transport = transport_on(Cluster.virtual(2, link=500.0), time)
    send(transport, 0, 1, [0])
    time.now = 1.5
    take(transport, 1, 0)
    assert time.slept == [pytest.approx(0.5)]
    send(transport, 0, 1, [1])
    time.now += 5
    take(transport, 1, 1)
    assert len(time.slept) == 1


def test_messages_of_one_direction_go_one_after_the_other():
    time = Time()
    transport = transport_on(Cluster.virtual(2, link=1000.0, latency=0.25), time)
    send(transport, 0, 1, [0, 1])
    send(transport, 1, 0, [2])
    take(transport, 0, 2)
    first = 1.0 + 0.25 - VIRTUAL_LATENCY_SECONDS
    assert time.now == pytest.approx(first)  # the other way is free
    take(transport, 1, 0)
    assert time.now == pytest.approx(first)
    take(transport, 1, 1)
    assert time.now == pytest.approx(first + 1.0)


def test_each_pair_of_devices_has_its_own_link():
    time = Time()
    slow = PairLink(between=("virtual:1", "virtual:2"), bandwidth=100.0)
    cluster = Cluster.virtual(3, link=1000.0).model_copy(update={"links": (slow,)})
    transport = transport_on(cluster, time)
    send(transport, 0, 1, [0])
    send(transport, 1, 2, [0])
    take(transport, 1, 0)
    assert time.now == pytest.approx(1.0)
    take(transport, 2, 0)
    assert time.now == pytest.approx(10.0)


def test_what_threads_need_anyway_is_not_slept():
    time = Time()
    transport = transport_on(Cluster.virtual(2, speed=0.5), time)
    send(transport, 0, 1, [0], floats=10**6)
    take(transport, 1, 0)
    assert time.slept == []


def test_messages_within_a_device_take_no_time():
    time = Time()
    plan = plan_by_hand(["0", "1", "2", "3"], [1, 2, 3], micro_batches=4, schedule="zb-v", chunks=2)
    plan = plan.model_copy(update={"cluster": Cluster.virtual(2, link=1.0)})
    schedule = plan.build_schedule()
    transport = emulated(plan, time).transport(ThreadTransport(schedule), schedule)
    assert schedule.device_of[1] == schedule.device_of[2]
    send(transport, 1, 2, [0])
    take(transport, 2, 0)
    assert time.slept == []


def test_the_waits_of_a_pipeline_are_those_of_its_plan(monkeypatch: pytest.MonkeyPatch):
    """On a clock that stands still, the last message of a direction arrives when all are through."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    profile = pipepart.profile(model, x, target=y, loss_fn=nn.MSELoss(), micro_batches=4)
    cluster = Cluster.virtual(2, link="1MB/s", latency=1e-3)
    plan = pipepart.plan(profile, cluster, cut_before=["1"], schedule="gpipe", micro_batches=4)
    costs = plan.stage_costs()
    each = costs.occupancy_between(0, 1, costs.message_bytes[0])
    fixed = costs.latency_between(0, 1) - plan.cluster.message_seconds
    slept: list[float] = []
    monkeypatch.setattr(emulation, "HOST_CLOCK", Clock(lambda: 0.0, slept.append))
    with Pipeline(model, plan, nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    assert sorted(slept) == pytest.approx(sorted([fixed + (number + 1) * each for number in range(4)] * 2))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_numbers_do_not_change(schedule, strict):
    cluster = Cluster.virtual(3, speed=[1, 0.5, 0.75], link="1GB/s", latency=1e-4, threads=1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = plain.twin(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with Pipeline(model, plan_on(cluster, schedule), nn.MSELoss(), strict=strict) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_nothing_is_emulated_where_a_cluster_only_describes(monkeypatch: pytest.MonkeyPatch):
    """As one of real devices, or one that measured runs have refined."""
    slept: list[float] = []
    monkeypatch.setattr(emulation, "HOST_CLOCK", Clock(lambda: 0.0, slept.append))
    described = Cluster.virtual(2).model_copy(update={"link": Link(bandwidth=1.0, latency=5.0)})
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Pipeline(model, plan_on(described), nn.MSELoss()) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert slept == []
