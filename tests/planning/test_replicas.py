"""Replicas and hosts: where copies and stages run, what a step and its sums take; proofs, thousands of devices."""

import itertools
import math
import time
from contextlib import suppress

import pytest

import pipepart
from pipepart import Cluster, Device, Plan, Profile, plan
from pipepart.cluster import Network
from pipepart.graph_partition.device_orders import all_orders, count_edges
from pipepart.planning import refine
from pipepart.planning.partition import order_search
from pipepart.planning.partition.reductions import all_reduce_seconds
from pipepart.planning.partition.replica_groups import groupings
from tests.planning.problems import Layer, cluster_of, profile_of
from tests.planning.test_best_cut import partitioned
from tests.support.chains import plan_by_hand

pytestmark = pytest.mark.usefixtures("no_suggestions")
LAYERS = [Layer(1 + i % 3, 1, 1, parameters=4, output=5, saved=10) for i in range(8)]


def test_a_copy_takes_as_long_as_the_model_alone_with_its_micro_batches():
    """Devices that are alike, links that cost nothing: four copies of one stage do two micro-batches each."""
    profile = profile_of(LAYERS, [8])
    plan = pipepart.plan(profile, Cluster.parse(["1GiB"] * 4), schedule="1f1b", replicas=4)
    seconds = sum(layer.forward + layer.backward_input + layer.backward_weight for layer in LAYERS)
    assert plan.predicted.step_seconds == pytest.approx(seconds * 2 / 8)
    assert plan.predicted.serial_seconds == pytest.approx(seconds)


def test_gradients_that_cost_much_to_sum_leave_one_copy():
    layers = [Layer(1 + i % 3, 1, 1, parameters=100_000, output=5) for i in range(8)]
    profile = profile_of(layers, [8])
    for link, replicas in ((1e9, 2), (3e5, 1)):
        cluster = Cluster.parse(["1GiB"] * 2, link=link)
        assert pipepart.plan(profile, cluster, schedule="1f1b", replicas="auto").replicas == replicas


def test_auto_is_no_slower_than_any_number_of_replicas_and_micro_batches():
    profile = profile_of(LAYERS, [4, 8])
    cluster = Cluster.parse(["300B", "300B", "300B@2", "300B"], link=100.0)
    best = pipepart.plan(profile, cluster, schedule="1f1b", replicas="auto")
    for count, replicas in itertools.product((4, 8), (1, 2, 4)):
        with suppress(pipepart.InfeasiblePlanError):
            other = pipepart.plan(profile, cluster, schedule="1f1b", micro_batches=count, replicas=replicas)
            assert best.predicted.step_seconds <= other.predicted.step_seconds * (1 + 1e-9)


MICRO_BATCHES = 4
FOUR = [Layer(4, 8, 4, parameters=10 * (index + 1), output=6, saved=5, peak=3) for index in range(4)]


def profile(optimizer: str = "adam") -> Profile:
    """Four layers of 4 s a micro-batch, forward and backward."""
    return profile_of(FOUR, [MICRO_BATCHES], optimizer=optimizer)


def in_copies(cluster: Cluster, schedule: str = "1f1b", optimizer: str = "adam") -> Plan:
    """Two stages, and a copy of them on each further two devices of the cluster."""
    first = Cluster(devices=cluster.devices[:2], link=cluster.link)
    made = plan(profile(optimizer), first, schedule="1f1b", micro_batches=MICRO_BATCHES)
    names = [device.name for device in cluster.devices[2:]]
    copies = tuple(zip(names[::2], names[1::2], strict=True))
    return Plan(
        **{**dict(made), "cluster": cluster, "replica_devices": copies, "schedule": schedule}
    ).refreshed()


def test_a_bidirectional_schedule_has_its_copies_on_the_same_devices():
    made = plan_by_hand(list("abcd"), [1, 2, 3], replicas=2, micro_batches=4, schedule="chimera")
    assert made.replicas == 2
    assert made.build_schedule().replicas == 4
    homes = [int(stage.device.removeprefix("virtual:")) for stage in made.all_stages]
    assert homes == [0, 1, 2, 3, 3, 2, 1, 0, 4, 5, 6, 7, 7, 6, 5, 4]


def test_the_slowest_copy_and_the_links_decide():
    fast, slow = (in_copies(cluster_of(1, 1, speed, speed)) for speed in (1, 0.5))
    assert slow.predicted.step_seconds == pytest.approx(2 * fast.predicted.step_seconds)
    assert slow.predicted.bottleneck_seconds == pytest.approx(2 * fast.predicted.bottleneck_seconds)
    # Gradients of stage 0 come from two copies one after the other, and its parameters go to both at once.
    linked = in_copies(cluster_of(*[1] * 6, bandwidth=5.0, latency=0.5))
    timeline = linked.simulate()
    first = linked.stages[0]
    assert first.gradient_bytes == sum(layer.parameters for layer in FOUR[: len(first.layers)])
    start, end = timeline.span(timeline.schedule.actions[0][-1])
    assert end - start == pytest.approx(3 * (0.5 + first.gradient_bytes / 5.0))
    others = [timeline.ends[row][-1] - timeline.starts[row][-1] for row in (2, 3, 4, 5)]
    assert others == [0, 0, 0, 0]


def test_on_a_cpu_what_is_added_up_and_set_takes_its_time():
    one = in_copies(cluster_of(1, 1, 1, 1))
    cpus = tuple(Device(name=f"device:{index}", kind="cpu", torch_device="cpu") for index in range(4))
    two = one.model_copy(update={"cluster": Cluster(devices=cpus)})
    size = one.stages[0].gradient_bytes + one.stages[0].parameter_bytes
    assert two.simulate().makespan - one.simulate().makespan == pytest.approx(size / 5e9, rel=1e-3)


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("adam", 2)])
def test_a_copy_holds_parameters_and_gradients_and_no_state_of_the_optimizer(optimizer, states):
    made = in_copies(cluster_of(1, 1, 1, 1), optimizer=optimizer)
    for own, copied in zip(made.all_stages[:2], made.all_stages[2:], strict=True):
        size = own.parameter_bytes
        assert (own.static_bytes, copied.static_bytes) == ((2 + states) * size, 2 * size)
    held = made.device_bytes()
    assert list(held) == [f"device:{index}" for index in range(4)]
    for index, stage in enumerate(made.stages):  # which gets the gradients of the copy
        assert held[f"device:{index}"] - held[f"device:{index + 2}"] >= states * stage.parameter_bytes
    assert made.predicted.memory_bytes == tuple(held.values())


def test_costs_are_refined_from_all_copies_by_the_speeds_of_their_devices():
    made = in_copies(cluster_of(1, 1, 1, 0.5))
    true = profile_of([Layer(2, 6, 4, parameters=8, output=6)] * 4, [MICRO_BATCHES])
    trace = made.model_copy(update={"profile": true}).refreshed().simulate()
    refined = refine(profile(), made, trace)
    assert [cost.forward.seconds for cost in refined.costs[0].layers] == pytest.approx([0.5] * 4)
    assert [cost.backward_seconds for cost in refined.costs[0].layers] == pytest.approx([2.5] * 4)


def test_the_first_replica_has_room_for_the_gradients_of_all():
    """100 bytes each of parameters and gradients, and twice as much state; then the gradients of two others."""
    made = pipepart.plan(
        profile_of([Layer(parameters=100)], [3]), Cluster.parse(["1KB"] * 3), schedule="1f1b", replicas=3
    )
    assert made.predicted.memory_bytes == (400 + 2 * 100, 200, 200)


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
