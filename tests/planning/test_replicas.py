"""Plans with several replicas of the model: where they run, what a step takes, what each device holds."""

import itertools
from contextlib import suppress

import pytest

import pipepart
from pipepart import Cluster, Device, Plan, Profile, plan
from pipepart.planning import refine
from tests.planning.problems import Layer, cluster_of, profile_of
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
