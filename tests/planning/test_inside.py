"""Plans of stages that are parallel inside: groups of devices for tensor parallelism, and sharded parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Cluster, Plan, Profile
from pipepart.planning import estimate, model_changes
from pipepart.profiling.costs import Collective

from .problems import Layer, profile_of

PROFILE = profile_of([Layer(parameters=100)] * 8, [4])


def test_a_device_of_the_plan_is_a_group_of_consecutive_devices():
    plan = pipepart.plan(PROFILE, Cluster.virtual(8), schedule="1f1b", tensor=2, replicas=2, stages=2)
    assert (plan.tensor, plan.replicas, len(plan.cluster)) == (2, 2, 8)
    firsts = {stage.device for stage in plan.stages}.union(*plan.replica_devices)
    assert firsts == {"virtual:0", "virtual:2", "virtual:4", "virtual:6"}
    assert plan.unused_devices == ()
    memory = plan.predicted.memory_bytes
    assert memory[::2] == memory[1::2]
    one = pipepart.plan(PROFILE, Cluster.virtual(4), schedule="1f1b", tensor=2, stages=1)
    assert one.unused_devices == ("virtual:2", "virtual:3")
    assert one.predicted.memory_bytes[2:] == (0, 0)


def test_groups_plan_as_single_devices_do():
    plan = pipepart.plan(PROFILE, Cluster.virtual(8), tensor=2)
    alone = pipepart.plan(PROFILE, Cluster.virtual(4))
    assert plan.predicted.step_seconds == alone.predicted.step_seconds
    assert plan.step_bound == alone.step_bound


def test_groups_may_differ_from_each_other():
    cluster = Cluster.parse(["2GiB", "1GiB", "1GiB@0.5", "1GiB@0.5"])
    plan = pipepart.plan(PROFILE, cluster, schedule="1f1b", tensor=2)
    assert [stage.device for stage in plan.stages] == ["device:0", "device:2"]
    assert [device.memory_bytes for device in plan.groups.devices] == [2**30, 2**30]
    assert len(plan.stages[0].layers) > len(plan.stages[1].layers)


@pytest.mark.parametrize(("ports", "shared"), [(1, 0.5), (4, 0.5), (8, 1.0)])
def test_members_of_a_group_share_the_ports_of_their_host(ports: int, shared: float):
    network = pipepart.cluster.links.Network(bandwidth=10e9, ports=ports)
    cluster = Cluster.parse(["1GiB"], hosts=2, devices_per_host=8, network=network)
    plan = pipepart.plan(PROFILE, cluster, schedule="1f1b", stages=2, tensor=2)
    (tier,) = plan.groups.network
    assert tier.bandwidth == 10e9 * shared
    assert tier.ports == min(ports, 4)


def test_an_edited_plan_is_checked():
    plan = pipepart.plan(PROFILE, Cluster.virtual(4), tensor=2, schedule="1f1b")
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    with pytest.raises(
        ValueError, match="shards the parameters of a stage over its replicas, and the plan has 1"
    ):
        Plan(**{**fields, "shard": True})
    with pytest.raises(ValueError, match="groups of 3 devices"):
        Plan(**{**fields, "tensor": 3})
    moved = tuple(stage.model_copy(update={"device": "virtual:1"}) for stage in plan.stages[:1])
    with pytest.raises(ValueError, match="is on device 'virtual:1'"):
        Plan(**{**fields, "stages": (*moved, *plan.stages[1:])})


def test_sharded_parameters_take_their_memory():
    """Each replica holds all parameters and gradients during the step, and a shard of parameters and state."""
    layers = [Layer(parameters=100)] * 4
    plan = pipepart.plan(
        profile_of(layers, [3], optimizer="adam"),
        Cluster.virtual(6),
        schedule="1f1b",
        stages=2,
        replicas=3,
        shard=True,
    )
    each = 100 + 34 + 100 + 67
    assert [stage.static_bytes for stage in plan.all_stages] == [2 * each] * 6
    assert all(stage.optimizer_bytes == 2 * 67 for stage in plan.all_stages)
    assert set(plan.predicted.memory_bytes) == {2 * each}


def test_sharded_gradients_are_reduced_and_parameters_gathered_once_a_step():
    cluster = Cluster.parse(["1GiB"] * 4, link="1MB/s", latency=0.001)
    profile = profile_of([Layer(parameters=1_000_000)] * 2, [4])
    plan = pipepart.plan(profile, cluster, schedule="1f1b", stages=1, replicas=4, shard=True)
    # A stage has 2 MB: each of 4 devices sends 3/4 of it twice, in 6 messages.
    assert plan.stage_costs().reduce_grad == pytest.approx([2 * 0.75 * 2.0 + 6 * 0.001] * 4)


def shared(profile: Profile, tensor: int, forward: list[Collective], backward: list[Collective]) -> Profile:
    """The profile of one of several processes, whose layers all have these collectives."""
    of_layers = {"forward_collectives": tuple(forward), "backward_collectives": tuple(backward)}
    entries = tuple(
        entry.model_copy(update={"layers": tuple(cost.model_copy(update=of_layers) for cost in entry.layers)})
        for entry in profile.costs
    )
    return profile.model_copy(update={"costs": entries, "tensor": tensor})


@pytest.mark.parametrize(
    ("kind", "size", "seconds"),
    [
        # Four devices: a quarter of 8 MB takes 2 s, a message 0.25 s.
        ("all-reduce", 8_000_000, 6 * (0.25 + 2.0)),
        ("all-reduce", 0, 4 * 0.25),  # along trees
        ("all-gather", 8_000_000, 3 * (0.25 + 2.0)),
        ("reduce-scatter", 8_000_000, 3 * (0.25 + 2.0)),
        ("all-to-all", 8_000_000, 3 * (0.25 + 2.0)),
        ("broadcast", 8_000_000, 2 * 0.25 + 8.0),
    ],
)
def test_collectives_take_the_seconds_of_the_links(kind: str, size: int, seconds: float):
    cluster = Cluster.parse(["1GiB"] * 8, link="1MB/s", latency=0.25)
    once = Collective(kind=kind, bytes=size)  # type: ignore[arg-type]
    twice = once.model_copy(update={"count": 2})
    profile = shared(profile_of([Layer(), Layer()], [2]), 4, [once], [twice])
    plan = pipepart.plan(profile, cluster, tensor=4, schedule="1f1b", stages=2)
    for stage in plan.stages:
        assert stage.forward_seconds == pytest.approx(0.5 + seconds)
        assert stage.backward_input_seconds == pytest.approx(0.5 + 2 * seconds)
    assert plan.predicted.step_seconds >= plan.step_bound
    assert plan.profile is not None
    assert plan.profile.costs == profile.costs  # as measured, so that it can be planned again
    assert plan.refreshed() == plan


def test_groups_over_hosts_share_the_network():
    """Two groups of four devices, each on both of two hosts: their rings share the port of each host."""
    cluster = Cluster.parse(["1GiB"], hosts=4, devices_per_host=2, link="1GB/s", network="2MB/s")
    profile = shared(
        profile_of([Layer(), Layer()], [2]), 4, [Collective(kind="all-gather", bytes=8_000_000)], []
    )
    plan = pipepart.plan(profile, cluster, tensor=4, schedule="1f1b", stages=2)
    assert plan.stages[0].forward_seconds == pytest.approx(0.5 + 3 * 2 / 2)


def halved(layers: list[Layer], tensor: int, size: int) -> Profile:
    """A profile of layers whose compute and bytes are shared evenly, with an all-reduce of ``size`` bytes each."""
    parts = [
        replace(
            layer,
            forward=layer.forward / tensor,
            backward_input=layer.backward_input / tensor,
            parameters=layer.parameters // tensor,
        )
        for layer in layers
    ]
    alone = profile_of(parts, [4, 8])
    return shared(alone, tensor, [Collective(kind="all-reduce", bytes=size)], []) if tensor > 1 else alone


@pytest.mark.parametrize("size", [0, 100_000, 100_000_000])
def test_auto_is_the_fastest_of_the_profiles(size: int):
    layers = [
        Layer(forward=4.0, backward_input=8.0, parameters=2**20)
    ] * 3  # eight devices do not share them evenly
    profiles = [halved(layers, tensor, size) for tensor in (1, 2, 4, 8)]
    cluster = Cluster.parse(["1GiB"] * 8, link="1MB/s")
    alone = [pipepart.plan(one, cluster, tensor=one.tensor, replicas="auto") for one in profiles]
    plan = pipepart.plan(profiles, cluster, tensor="auto", replicas="auto")
    assert plan.predicted.step_seconds == min(one.predicted.step_seconds for one in alone)
    assert plan.constraints.tensor == plan.tensor
    assert plan.tensor == 1 if size == 100_000_000 else plan.tensor > 1


def test_auto_takes_the_numbers_that_fit_and_that_make_groups():
    layers = [Layer(parameters=2**20)] * 2  # 8 MiB with gradients and optimizer state
    profiles = [halved(layers, tensor, 10**9) for tensor in (1, 2)]
    cluster = Cluster.parse(["3MiB"] * 4, link="1MB/s")
    plan = pipepart.plan(profiles, cluster, tensor="auto", recompute="never")
    assert plan.tensor == 2
    with pytest.raises(pipepart.InfeasiblePlanError, match="is short by"):
        pipepart.plan(profiles, cluster.with_memory("1MiB"), tensor="auto", seconds=2.0)
    profiles = [halved([Layer()] * 4, tensor, 0) for tensor in (1, 2, 4)]
    assert pipepart.plan(profiles, Cluster.virtual(6), tensor="auto", replicas=3).tensor == 2
    with pytest.raises(ValueError, match="groups of 4 devices"):
        pipepart.plan(profiles[2:], Cluster.virtual(6), tensor="auto")


def test_collectives_of_a_size_that_was_not_measured_are_estimated():
    small, large = (
        shared(
            profile_of([Layer(output=1)], [count]), 2, [Collective(kind="all-reduce", bytes=size)], []
        ).costs[0]
        for count, size in ((8, 100), (2, 400))
    )
    profile = profile_of([Layer(output=1)], [8]).model_copy(
        update={"costs": (small, large.model_copy(update={"samples": 4})), "tensor": 2}
    )
    (cost,) = estimate(profile, 4).at(4).layers
    assert cost.forward_collectives == (Collective(kind="all-reduce", bytes=200),)
    assert cost.backward_collectives == ()


def test_a_model_is_that_of_a_profile_of_some_of_its_processes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    profile = pipepart.profile(model, torch.randn(2, 2), seconds=0.0, devices=1)
    halves = tuple(info.model_copy(update={"parameter_bytes": 12}) for info in profile.layers)
    half = profile.model_copy(update={"tensor": 2, "layers": halves})
    plan = pipepart.plan(half, Cluster.virtual(4), tensor=2, schedule="1f1b")
    assert model_changes(plan, model) == []
    assert model_changes(plan, nn.Sequential(nn.Linear(2, 2), nn.Tanh())) != []
