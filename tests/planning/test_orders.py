"""The order of unlike devices, links that differ, recompute and wishes: against every way there is."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
import schedules
from pipepart import Cluster, Device, InfeasiblePlanError, Link
from pipepart.cluster import PairLink
from pipepart.graph_partition.device_orders import all_orders, device_types
from tests.planning.problems import Layer, chains, profile_of
from tests.planning.ways import check_against_every_way, unlike

quick = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
many = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


problems = {
    "layers": chains(most=5),
    "cluster": unlike(),
    "schedule": st.sampled_from(["1f1b", "gpipe", "eager-1f1b"]),
    "micro_batches": st.integers(1, 4),
    "recompute": st.sampled_from(["auto", "never", "except-last", "always"]),
    "stages": st.integers(1, 4),
}


def check_problem(layers, cluster, schedule, micro_batches, recompute, stages) -> None:
    stages = min(stages, len(layers), len(cluster))
    built = schedules.build(schedule, devices=stages, micro_batches=micro_batches)
    check_against_every_way(layers, cluster, built, recompute)


@given(**problems)
@quick
def test_no_order_of_the_devices_has_a_smaller_bottleneck(
    layers, cluster, schedule, micro_batches, recompute, stages
):
    check_problem(layers, cluster, schedule, micro_batches, recompute, stages)


@pytest.mark.slow
@given(**problems)
@many
def test_no_order_of_thousands_has_a_smaller_bottleneck(
    layers, cluster, schedule, micro_batches, recompute, stages
):
    check_problem(layers, cluster, schedule, micro_batches, recompute, stages)


def test_the_small_device_takes_the_end_where_little_is_in_flight():
    """1F1B holds three stashes on the first stage and one on the last: the device with the least memory goes last."""
    profile = profile_of([Layer(saved=10)] * 3, [4])
    plan = pipepart.plan(profile, described(10, 30, 20), schedule="1f1b", recompute="never")
    assert [stage.device for stage in plan.stages] == ["device:1", "device:2", "device:0"]
    with pytest.raises(InfeasiblePlanError, match="short by 1 byte "):
        pipepart.plan(profile, described(10, 30, 19), schedule="1f1b", recompute="never", stages=3)


def test_the_fast_device_takes_the_heavy_layer_wherever_it_is():
    layers = [Layer(forward=cost) for cost in (1, 1, 8, 1)]
    cluster = Cluster.parse(["1GiB@4", "1GiB", "1GiB"])
    plan = pipepart.plan(profile_of(layers, [1]), cluster, schedule="1f1b")
    assert "layer2" in next(stage for stage in plan.stages if stage.device == "device:0").layers


def test_neighbours_are_joined_by_the_quick_links():
    """A ring in which only 0-2 and 2-1 are quick: the pipeline runs 0, 2, 1 or back."""
    layers = [Layer(output=100, parameters=1)] * 3
    devices = tuple(Device(name=name, kind="made up") for name in "abc")
    links = tuple(PairLink(between=("c", other), bandwidth=1e9) for other in "ab")
    cluster = Cluster(devices=devices, link=Link(bandwidth=10.0), links=links)
    plan = pipepart.plan(profile_of(layers, [1]), cluster, schedule="1f1b", stages=3)
    assert plan.stages[1].device == "c"
    assert plan.stages[1].transfer_seconds == pytest.approx(4 * 100 / 1e9)
    alike = cluster.model_copy(update={"links": ()})
    slow = pipepart.plan(profile_of(layers, [1]), alike, schedule="1f1b", stages=3)
    assert slow.predicted.step_seconds > plan.predicted.step_seconds + 4 * 100 / 10 - 1e-6


def test_a_cluster_of_one_kind_keeps_its_order():
    plan = pipepart.plan(profile_of([Layer()] * 6, [2]), Cluster.virtual(3), schedule="1f1b")
    assert [stage.device for stage in plan.stages] == ["virtual:0", "virtual:1", "virtual:2"]


def test_devices_that_could_be_exchanged_are_of_one_type():
    devices = tuple(Device(name=name, kind="made up") for name in "abcd")
    assert [kind.devices for kind in device_types(Cluster(devices=devices))] == [(0, 1, 2, 3)]
    pair = (PairLink(between=("a", "b"), bandwidth=1.0), PairLink(between=("c", "d"), bandwidth=1.0))
    assert [kind.devices for kind in device_types(Cluster(devices=devices, links=pair[:1]))] == [
        (0, 1),
        (2, 3),
    ]
    assert [kind.devices for kind in device_types(Cluster(devices=devices, links=pair))] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(("kinds", "count"), [((3,), 1), ((2, 1), 3), ((1, 1, 1), 6)])
def test_the_walk_has_every_order_once(kinds, count):
    orders = all_orders([range(size) for size in kinds], 3)
    paths = [[state] for state in orders.ends]
    for left in range(1, 4):
        paths = [
            [*path, int(orders.state[edge])]
            for path in paths
            for edge in range(len(orders.rest))
            if orders.rest[edge] == path[-1] and orders.left[edge] == left
        ]
    assert len(paths) == count
    assert {path[-1] for path in paths} == set(orders.full.tolist())


def described(*sizes: int) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(name=f"device:{index}", kind="made up", memory_bytes=size)
            for index, size in enumerate(sizes)
        )
    )


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([("a", "x")], "joins 'x', the cluster has"),
        ([("a", "a")], "joins two devices, got 'a' twice"),
        ([("a", "b"), ("b", "a")], "two links join 'b' and 'a'"),
    ],
)
def test_links_of_devices_that_are_not_there_are_refused(links, words):
    devices = tuple(Device(name=name, kind="made up") for name in "ab")
    with pytest.raises(ValueError, match=words):
        Cluster(devices=devices, links=tuple(PairLink(between=pair) for pair in links))
