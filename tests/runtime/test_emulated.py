"""Emulated speeds and links: who waits for how long, on a clock that stands still unless a test moves it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
import schedules
from pipepart import Cluster, Link, Pipeline, Plan
from pipepart.runtime.emulation import DeviceEmulation, emulation
from pipepart.runtime.emulation.transport import Clock
from pipepart.runtime.transport.threads import ThreadTransport, Transport
from schedules import Kind
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


def test_nothing_is_emulated_where_a_cluster_only_describes(monkeypatch: pytest.MonkeyPatch):
    """As one of real devices, or one that measured runs have refined."""
    slept: list[float] = []
    monkeypatch.setattr(emulation, "HOST_CLOCK", Clock(lambda: 0.0, slept.append))
    described = Cluster.virtual(2).model_copy(update={"link": Link(bandwidth=1.0, latency=5.0)})
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Pipeline(model, plan_on(described), nn.MSELoss()) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert slept == []
