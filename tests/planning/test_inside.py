"""Plans of stages that are parallel inside: groups of devices for tensor parallelism, and sharded parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipepart
from pipepart import Cluster, Plan
from pipepart.planning import replan

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
    assert "2 consecutive devices share its layers" in str(plan)


def test_a_device_left_out_takes_its_group_with_it():
    plan = pipepart.plan(PROFILE, Cluster.virtual(4), schedule="1f1b", tensor=2, stages=1)
    assert plan.unused_devices == ("virtual:2", "virtual:3")
    assert plan.predicted.memory_bytes[2:] == (0, 0)


def test_groups_plan_as_single_devices_do():
    plan = pipepart.plan(PROFILE, Cluster.virtual(8), tensor=2)
    alone = pipepart.plan(PROFILE, Cluster.virtual(4))
    assert plan.predicted.step_seconds == alone.predicted.step_seconds
    assert plan.step_bound == alone.step_bound


def test_groups_may_differ_from_each_other():
    cluster = Cluster.parse(["1GiB", "2GiB", "1GiB@0.5", "1GiB@0.5"])
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


def test_a_file_keeps_tensor_and_shard(tmp_path: Path):
    plan = pipepart.plan(PROFILE, Cluster.virtual(8), tensor=2, replicas=2, shard=True, schedule="1f1b")
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    again = replan(plan, plan.simulate())
    assert (again.tensor, again.shard, again.cluster) == (2, True, plan.cluster)
    old = path.read_text().replace('"tensor": 2,', "").replace('"shard": true,', "")
    path.write_text(old)
    assert (Plan.load(path).tensor, Plan.load(path).shard) == (1, False)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tensor": 3}, "groups of 3 devices, and the cluster has 8"),
        ({"tensor": 0}, "tensor must be a whole number of at least 1, got 0"),
        ({"tensor": True}, "tensor must be a whole number of at least 1, got True"),
        ({"shard": True}, "needs replicas='auto' or at least 2"),
        ({"tensor": 8, "replicas": "auto", "shard": True}, "1 device of 8 processes"),
        ({"tensor": 2, "schedule": "pipedream"}, "several versions or copies of the weights"),
        ({"tensor": 2, "schedule": "chimera"}, "several versions or copies of the weights"),
        ({"shard": True, "replicas": 2, "offload": "stash"}, "offload='stash' cannot be combined"),
        ({"tensor": 4, "replicas": 3}, "between 1 and the number of devices, 2"),
    ],
)
def test_what_is_refused(keywords: dict, message: str):
    with pytest.raises(ValueError, match=message):
        pipepart.plan(PROFILE, Cluster.virtual(8, host_link="8GB/s"), **keywords)


def test_unlike_devices_make_no_group():
    cluster = Cluster.parse(["1GiB", "1GiB@0.5", "1GiB@0.5", "1GiB"])
    with pytest.raises(ValueError, match=r"'device:0' .* speed 1, 'device:1' .* speed 0\.5\. List devices"):
        pipepart.plan(PROFILE, cluster, tensor=2)


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
