"""Orders of devices over hosts, and the price of replicas between hosts: proofs, closed forms, thousands of devices."""

import itertools
import math
import time

import pytest

import pipepart
from pipepart import Cluster, Plan
from pipepart.cluster import Network
from pipepart.graph_partition.device_orders import all_orders, count_edges
from pipepart.planning.partition import order_search
from pipepart.planning.partition.reductions import all_reduce_seconds
from pipepart.planning.partition.replica_groups import groupings
from tests.planning.problems import Layer, profile_of
from tests.planning.test_best_cut import partitioned


def chain(count: int, output: int = 1000) -> list[Layer]:
    return [
        Layer(
            1 + index * 7 % 5 / 4,
            1 + index * 3 % 4 / 3,
            1,
            parameters=10,
            output=output * (1 + index * 5 % 9),
            saved=10,
        )
        for index in range(count)
    ]


def smallest_bottleneck(layers: list[Layer], cluster: Cluster, stages: int) -> Plan:
    """The plan under 1F1B of the cut with the smallest bottleneck, before anything is simulated."""
    profile = profile_of(layers, [4])
    found = partitioned(profile, cluster, schedule="1f1b", stages=stages, recompute="never")
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("network", [1e3, 1e4, 1e6])
def test_the_bound_of_too_many_orders_is_below_the_best_of_all(monkeypatch, network, stages):
    cluster = Cluster.parse(["1GiB@0.5"], hosts=3, devices_per_host=2, link=1e6, network=network)
    best = smallest_bottleneck(chain(9), cluster, stages)
    monkeypatch.setattr(order_search, "_MOST_WORK", 0)
    few = smallest_bottleneck(chain(9), cluster, stages)
    assert best.predicted.bottleneck_optimal
    assert 0 < few.predicted.bottleneck_bound <= best.predicted.bottleneck_seconds * (1 + 1e-9)
    assert best.predicted.bottleneck_seconds <= few.predicted.bottleneck_seconds * (1 + 1e-9)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1, 1), (3, 2, 2), (1, 4, 1, 2), (7,)], ids=str)
@pytest.mark.parametrize("stages", [1, 3, 6])
def test_the_edges_of_orders_are_counted_without_making_them(counts, stages):
    ends = list(itertools.accumulate(counts, initial=0))
    groups = [range(*pair) for pair in itertools.pairwise(ends)]
    edges = len(all_orders(groups, stages).type)
    assert count_edges(groups, stages, math.inf) == edges
    if len(groups) > 1:
        assert count_edges(groups, stages, edges - 1) >= edges


@pytest.mark.parametrize(("hosts", "each", "stages"), [(2, 8, 16), (3, 4, 12)])
def test_orders_of_alike_hosts_are_proven(hosts, each, stages):
    cluster = Cluster.parse(["1GiB"], hosts=hosts, devices_per_host=each, link=1e6, network=1e5)
    found = smallest_bottleneck(chain(96), cluster, stages).predicted
    assert found.bottleneck_seconds == pytest.approx(found.bottleneck_bound, rel=1e-9)


def test_of_too_many_orders_some_are_tried():
    """Unlike devices take stages about in proportion to their speeds."""
    speeds = [f"1GiB@{0.5 + index / 10:.1f}" for index in range(16)]
    found = smallest_bottleneck(chain(40), Cluster.parse(speeds, link=1e6), 16).predicted
    even = sum(layer.forward + layer.backward_input + layer.backward_weight for layer in chain(40)) / 20 / 4
    assert even <= found.bottleneck_bound <= found.bottleneck_seconds < 1.5 * found.bottleneck_bound


@pytest.mark.parametrize("size", [1_000, 1_000_000_000])
def test_an_all_reduce_runs_by_the_cheaper_of_ring_and_trees(size):
    cluster = Cluster.parse(["1GiB"], hosts=8, link=1e12, network=1e9, network_latency=1e-3)
    names = [device.name for device in cluster.devices]
    ring = 14 * (1e-3 + size / 8 / 1e9)
    trees = 2 * 3 * 1e-3 + 2 * size / 1e9
    assert all_reduce_seconds(size, names, cluster) == pytest.approx(min(ring, trees))
    assert (ring < trees) == (size > 1_000_000)


def hosts_of(plan: Plan) -> list[list[str]]:
    rows = [[stage.device for stage in plan.stages], *plan.replica_devices]
    return [[plan.cluster.device(name).host for name in row] for row in rows]


def test_replicas_lie_on_hosts_as_is_cheaper():
    """Large gradients are summed within a host, large outputs stay within one."""
    cluster = Cluster.parse(["1GiB"], hosts=2, devices_per_host=2, link=1e9, network=1e3)
    assert len(groupings(cluster, 2)) == 2
    many_weights = [Layer(1, 1, 1, parameters=10_000, output=1) for _ in range(4)]
    made = pipepart.plan(profile_of(many_weights, [4]), cluster, schedule="1f1b", replicas=2)
    assert hosts_of(made) == [["host:0", "host:1"]] * 2
    large_outputs = [Layer(1, 1, 1, parameters=1, output=10_000) for _ in range(4)]
    made = pipepart.plan(profile_of(large_outputs, [4]), cluster, schedule="1f1b", replicas=2)
    assert hosts_of(made) == [["host:0"] * 2, ["host:1"] * 2]


def test_every_replica_steps_its_optimizer_where_gradients_are_all_reduced():
    cluster = Cluster.parse(["1GiB"], hosts=2, link=1e9, network=1e6)
    profile = profile_of([Layer(parameters=100)] * 2, [4], optimizer="adam")
    made = pipepart.plan(profile, cluster, schedule="1f1b", replicas=2)
    assert made.predicted.memory_bytes[0] == made.predicted.memory_bytes[1]
    timeline = made.simulate()
    size = made.stages[0].gradient_bytes
    taken = [ends[-1] - starts[-1] for starts, ends in zip(timeline.starts, timeline.ends, strict=True)]
    assert taken == pytest.approx([all_reduce_seconds(size, ["device:0", "device:1"], cluster)] * 2)


def test_a_port_that_replicas_share_slows_all_of_them():
    """Two replicas whose stages send through one port at the same time."""
    layers = [Layer(1, 1, 1, parameters=1000, output=100) for _ in range(2)]
    steps = []
    for ports in (1, 2):
        network = Network(bandwidth=50.0, ports=ports)
        cluster = Cluster.parse(["1GiB"], hosts=2, devices_per_host=2, link=1e9, network=network)
        made = pipepart.plan(profile_of(layers, [2]), cluster, schedule="gpipe", replicas=2, stages=2)
        assert hosts_of(made) == [["host:0", "host:1"]] * 2  # gradients are summed within a host
        steps.append(made.predicted.step_seconds)
    # An output and a gradient of 50 bytes take two seconds each through the port of both, and one through their own.
    assert steps[0] - steps[1] == pytest.approx(2 * 50 / 50)


@pytest.mark.parametrize(
    ("schedule", "layers", "devices", "micro_batches"),
    [
        ("auto", 40, 1100, 1024),
        ("1f1b", 300, 64, 512),
        ("1f1b", 1, 3, 1024),
        ("interleaved-1f1b", 300, 64, 512),
    ],
)
def test_a_plan_that_is_affordable_to_simulate_is_made_when_the_time_is_up(
    schedule, layers, devices, micro_batches
):
    cluster = Cluster.parse([f"1TiB@{1 + index % 97}" for index in range(devices)])
    made = pipepart.plan(profile_of(chain(layers), [micro_batches]), cluster, schedule=schedule, seconds=1e-9)
    assert made.out_of_time
    assert made.fits
    size = len(made.stages) * micro_batches  # what a simulation takes grows with it
    assert size <= 4700
    if schedule != "interleaved-1f1b":
        assert size > 3500 or len(made.stages) == layers


@pytest.mark.slow
def test_thousands_of_devices_are_planned_in_seconds():
    layers = [
        Layer(1 + index % 3 / 10, 1, 1, parameters=10_000_000, output=1_000_000, saved=1000)
        for index in range(96)
    ]
    cluster = Cluster.parse(
        ["80GiB"], hosts=512, devices_per_host=8, link="300GB/s", network="25GB/s", network_latency=1e-5
    )
    begin = time.process_time()
    made = pipepart.plan(profile_of(layers, [256]), cluster, schedule="1f1b", stages=64, replicas=64)
    assert (len(made.stages), made.replicas, len(made.predicted.memory_bytes)) == (64, 64, 4096)
    assert time.process_time() - begin < 60
