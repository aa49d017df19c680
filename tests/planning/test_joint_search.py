"""The joint search of cut, placement and order: it keeps constraints, fits the memory, and is repeatable."""

import math

import pytest

import schedules
from pipepart import Cluster, Device, Link, Plan
from tests.planning.joint_requests import found_for
from tests.planning.problems import Layer, profile_of

LAYERS = [
    Layer(1 + i % 3, 1 + i % 2, backward_weight=1, parameters=3, output=5, saved=10, waiting=4)
    for i in range(10)
]


def devices(count: int, memory: int | None = None, speeds: tuple[float, ...] = ()) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(
                name=f"device:{i}", kind="made up", memory_bytes=memory, speed=(*speeds, *[1.0] * count)[i]
            )
            for i in range(count)
        ),
        link=Link(bandwidth=100.0, latency=0.01),
    )


def check(plan: Plan | None) -> Plan:
    """A plan that runs, fits, and has the step that the simulation gives."""
    assert plan is not None
    schedules.check(plan.build_schedule())
    assert plan.simulate().makespan == plan.predicted.step_seconds
    for device, size in zip(plan.cluster.devices, plan.predicted.memory_bytes, strict=True):
        assert size <= (device.memory_bytes or math.inf)
    return plan


def test_equal_arguments_give_equal_plans():
    profile, cluster = profile_of(LAYERS, [4]), devices(3)
    assert found_for(profile, cluster) == check(found_for(profile, cluster))


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_is_near_the_bound(replicas):
    profile, cluster = profile_of(LAYERS, [8]), devices(4)
    plan = check(found_for(profile, cluster, replicas=replicas))
    assert plan.predicted.step_seconds <= 1.2 * plan.predicted.serial_seconds / 4


def test_it_keeps_to_the_memory_and_recomputes_where_it_must():
    profile = profile_of(LAYERS, [4])
    free = check(found_for(profile, devices(3)))
    need = max(free.predicted.memory_bytes)
    steps = []
    for part in (0.8, 0.6, 0.45):
        plan = check(found_for(profile, devices(3, memory=int(need * part))))
        steps.append(plan.predicted.step_seconds)
    assert steps == sorted(steps)
    assert steps[0] >= free.predicted.step_seconds


def test_messages_that_wait_are_in_the_memory():
    """A fast device before a slow one: layouts whose messages pile up do not fit, and the search passes them over."""
    layers = [Layer(8, 8, 8, output=30, saved=10)] * 8
    cluster = Cluster(
        devices=tuple(
            Device(name=f"device:{at}", kind="made up", memory_bytes=memory, speed=speed)
            for at, (memory, speed) in enumerate([(10_000, 4.0), (200, 1.0), (200, 1.0)])
        ),
        link=Link(bandwidth=1000.0),
    )
    plan = check(found_for(profile_of(layers, [16]), cluster))
    slow = ("device:1", "device:2")
    assert any(stage.device in slow for stage in plan.stages)
    assert plan.predicted.step_seconds < sum(8 * 3 for _ in layers) / 4.0


@pytest.mark.parametrize(("host_link", "mode"), [(1e6, "offload"), (0.1, "always")])
def test_stages_offload_if_the_link_to_the_host_is_fast(host_link, mode):
    layers = [Layer(8.0, 8.0, 8.0, output=10, saved=100)] * 4
    cluster = Cluster.parse(["500B"] * 2, host_link=host_link)
    plan = check(found_for(profile_of(layers, [8]), cluster))
    recomputes = check(found_for(profile_of(layers, [8]), cluster, offload="never"))
    modes = {stage.mode for stage in plan.stages}
    if mode == "offload":
        assert mode in modes
        assert plan.predicted.step_seconds < recomputes.predicted.step_seconds
    else:
        assert "offload" not in modes


def test_too_many_devices_or_micro_batches_are_left_to_named_schedules():
    profile = profile_of([Layer()] * 200, [4])
    assert found_for(profile, devices(129), operations=10**9) is None
    assert found_for(profile, devices(128), operations=40 * 3 * 4 * 128 - 1) is None


def test_constraints_hold():
    profile, cluster = profile_of(LAYERS, [4]), devices(3)
    plan = check(found_for(profile, cluster, chunks=2, cut_before=["layer2", "layer5", "layer7"]))
    assert [stage.layers[0] for stage in plan.stages] == ["layer0", "layer2", "layer5", "layer7"]
    plan = check(found_for(profile, cluster, colocate=[["layer1", "layer4"]], no_cut_before=["layer7"]))
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    assert stage_of["layer1"] == stage_of["layer4"]
    assert stage_of["layer6"] == stage_of["layer7"]
    plan = check(found_for(profile, cluster, pin={"layer3": 1}, stages=3))
    assert len(plan.stages) == 3
    assert "layer3" in plan.stages[1].layers


def test_a_slow_device_gets_less_or_nothing():
    plan = check(found_for(profile_of(LAYERS, [4]), devices(3, speeds=(1.0, 1.0, 0.01))))
    assert {stage.device for stage in plan.stages} == {"device:0", "device:1"}
