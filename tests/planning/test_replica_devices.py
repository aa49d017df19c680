"""Plans with several copies of the model: where they run, what a step takes, what each device holds."""

import pytest

from pipepart import Cluster, Device, Link, Plan, Profile, plan
from pipepart.planning import StagePlan, refine
from tests.planning.problems import Layer, profile_of
from tests.support.chains import plan_by_hand

MICRO_BATCHES = 4
LAYERS = [Layer(4, 8, 4, parameters=10 * (index + 1), output=6, saved=5, peak=3) for index in range(4)]


def cluster_of(
    *speeds: float, memory: int | None = None, bandwidth: float | None = None, latency: float = 0.0
) -> Cluster:
    devices = tuple(
        Device(name=f"d{index}", kind="made up", speed=speed, memory_bytes=memory)
        for index, speed in enumerate(speeds)
    )
    return Cluster(devices=devices, link=Link(bandwidth=bandwidth, latency=latency))


def profile(optimizer: str = "adam") -> Profile:
    """Four layers of 4 s a micro-batch, forward and backward."""
    return profile_of(LAYERS, [MICRO_BATCHES], optimizer=optimizer)


def in_copies(cluster: Cluster, schedule: str = "1f1b", optimizer: str = "adam") -> Plan:
    """Two stages, and a copy of them on each further two devices of the cluster."""
    first = Cluster(devices=cluster.devices[:2], link=cluster.link)
    made = plan(profile(optimizer), first, schedule="1f1b", micro_batches=MICRO_BATCHES)
    names = [device.name for device in cluster.devices[2:]]
    copies = tuple(zip(names[::2], names[1::2], strict=True))
    return Plan(
        **{**dict(made), "cluster": cluster, "replica_devices": copies, "schedule": schedule}
    ).refreshed()


def test_each_copy_has_devices_of_its_own():
    made = plan_by_hand(
        list("abcd"), [1, 2, 3], replicas=2, micro_batches=4, schedule="interleaved-1f1b", chunks=2
    )
    assert made.replicas == 2
    assert [device.name for device in made.workers] == [f"virtual:{index}" for index in range(4)]
    assert [stage.device for stage in made.all_stages] == [
        f"virtual:{index}" for index in (0, 1, 0, 1, 2, 3, 2, 3)
    ]
    schedule = made.build_schedule()
    assert (schedule.replicas, schedule.devices, schedule.micro_batches) == (2, 4, 4)


def test_a_bidirectional_schedule_has_its_copies_on_the_same_devices():
    made = plan_by_hand(list("abcd"), [1, 2, 3], replicas=2, micro_batches=4, schedule="chimera")
    assert made.replicas == 2
    assert made.build_schedule().replicas == 4
    homes = [int(stage.device.removeprefix("virtual:")) for stage in made.all_stages]
    assert homes == [0, 1, 2, 3, 3, 2, 1, 0, 4, 5, 6, 7, 7, 6, 5, 4]


def test_a_step_takes_as_long_as_one_copy_with_its_share_and_the_sum():
    alone = in_copies(cluster_of(1, 1))
    alike = in_copies(cluster_of(1, 1, 1, 1))
    half = profile_of(LAYERS, [MICRO_BATCHES // 2])
    costs = half.costs[0].model_copy(update={"layers": profile().costs[0].layers})
    share = plan(
        half.model_copy(update={"costs": (costs,)}), cluster_of(1, 1), schedule="1f1b", micro_batches=2
    )
    assert alike.predicted.step_seconds == pytest.approx(share.predicted.step_seconds)
    assert alike.predicted.step_seconds < alone.predicted.step_seconds
    assert alike.predicted.serial_seconds == alone.predicted.serial_seconds == 64
    assert alike.predicted.bottleneck_seconds == alone.predicted.bottleneck_seconds


def test_the_slowest_copy_and_the_links_decide():
    fast, slow = (in_copies(cluster_of(1, 1, speed, speed)) for speed in (1, 0.5))
    assert slow.predicted.step_seconds == pytest.approx(2 * fast.predicted.step_seconds)
    assert slow.predicted.bottleneck_seconds == pytest.approx(2 * fast.predicted.bottleneck_seconds)
    # Gradients of stage 0 come from two copies one after the other, and its parameters go to both at once.
    linked = in_copies(cluster_of(*[1] * 6, bandwidth=5.0, latency=0.5))
    timeline = linked.simulate()
    first = linked.stages[0]
    assert (
        first.gradient_bytes
        == first.parameter_bytes
        == sum(layer.parameters for layer in LAYERS[: len(first.layers)])
    )
    start, end = timeline.span(timeline.schedule.actions[0][-1])
    assert end - start == pytest.approx(3 * (0.5 + first.gradient_bytes / 5.0))
    others = [timeline.ends[row][-1] - timeline.starts[row][-1] for row in (2, 3, 4, 5)]
    assert others == [0, 0, 0, 0]


def test_on_a_cpu_what_is_added_up_and_set_takes_its_time():
    one, two = (
        in_copies(cluster_of(1, 1, 1, 1)).model_copy(update={"cluster": cluster})
        for cluster in (
            cluster_of(1, 1, 1, 1),
            Cluster(
                devices=tuple(Device(name=f"d{index}", kind="cpu", torch_device="cpu") for index in range(4))
            ),
        )
    )
    size = one.stages[0].gradient_bytes + one.stages[0].parameter_bytes
    assert two.simulate().makespan - one.simulate().makespan == pytest.approx(size / 5e9, rel=1e-3)


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("adam", 2)])
def test_a_copy_holds_parameters_and_gradients_and_no_state_of_the_optimizer(optimizer, states):
    made = in_copies(cluster_of(1, 1, 1, 1), optimizer=optimizer)
    for own, copied in zip(made.all_stages[:2], made.all_stages[2:], strict=True):
        size = own.parameter_bytes
        assert (own.static_bytes, copied.static_bytes) == ((2 + states) * size, 2 * size)
    held = made.device_bytes()
    assert list(held) == ["d0", "d1", "d2", "d3"]
    for own, copied, stage in zip(("d0", "d1"), ("d2", "d3"), made.stages, strict=True):
        assert held[own] - held[copied] >= states * stage.parameter_bytes  # it gets the gradients of the copy
    assert made.predicted.memory_bytes == tuple(held.values())


def test_a_device_of_two_directions_holds_a_stage_of_each():
    made = in_copies(cluster_of(1, 1), schedule="chimera")
    down, up = made.stages
    fixed = (down.static_bytes + 2 * up.parameter_bytes, up.static_bytes + 2 * down.parameter_bytes)
    stashes = made.simulate().peak_bytes
    most = max(*down.workspace_bytes, *up.workspace_bytes) + sum(down.message_bytes + up.message_bytes)
    gradients = down.gradient_bytes + up.gradient_bytes
    for least, stash, held in zip(fixed, stashes, made.device_bytes().values(), strict=True):
        assert least + stash <= held <= least + max(stash + most, gradients)


def test_a_copy_that_does_not_fit_is_no_plan(tmp_path):
    made = in_copies(cluster_of(1, 1, 1, 1))
    need = made.device_bytes()["d3"]
    for short in (0, 1):
        devices = [
            *made.cluster.devices[:3],
            made.cluster.devices[3].model_copy(update={"memory_bytes": need - short}),
        ]
        cluster = made.cluster.model_copy(update={"devices": tuple(devices)})
        made.model_copy(update={"cluster": cluster}).save(tmp_path / "plan.json")
        if short:
            with pytest.raises(ValueError, match=r"device 'd3' \(stage 1\) is short by 1 byte"):
                Plan.load(tmp_path / "plan.json")
        else:
            assert Plan.load(tmp_path / "plan.json").replica_devices == (("d2", "d3"),)


@pytest.mark.parametrize(
    ("copies", "why"),
    [
        ((("virtual:2",),), "replica 1 of the model has 1 device, it needs one for each of the 2 stages"),
        ((("virtual:2", "virtual:1"),), "stages 1 and 1 of replica 1 are both on device 'virtual:1'"),
        (
            (("virtual:2", "virtual:2"),),
            "stages 0 of replica 1 and 1 of replica 1 are both on device 'virtual:2'",
        ),
        ((("virtual:2", "cuda:0"),), "stage 1 of replica 1 is on device 'cuda:0', the cluster has"),
        (
            (("virtual:2", "virtual:3"), ("virtual:4", "virtual:5")),
            "3 replicas of the model cannot share 2 micro-batches",
        ),
    ],
)
def test_copies_that_cannot_be_are_refused(copies, why):
    with pytest.raises(ValueError, match=why):
        Plan(
            stages=tuple(StagePlan(layers=(name,), device=f"virtual:{name}") for name in "01"),
            cluster=Cluster.virtual(6),
            schedule="1f1b",
            micro_batches=2,
            replica_devices=copies,
        )


def test_chunks_of_a_copy_lie_where_the_schedule_has_them():
    made = plan_by_hand(list("abcd"), [1, 2, 3], replicas=2, micro_batches=4, schedule="zb-v", chunks=2)
    with pytest.raises(
        ValueError, match="has stages 0 and 3 of replica 1 on one device, the plan has them on"
    ):
        Plan(**{**dict(made), "replica_devices": (("virtual:2", "virtual:3", "virtual:2", "virtual:3"),)})


def test_costs_are_refined_from_all_copies_by_the_speeds_of_their_devices():
    made = in_copies(cluster_of(1, 1, 1, 0.5))
    true = profile_of([Layer(2, 6, 4, parameters=8, output=6)] * 4, [MICRO_BATCHES])
    trace = made.model_copy(update={"profile": true}).refreshed().simulate()
    refined = refine(profile(), made, trace)
    assert [cost.forward.seconds for cost in refined.costs[0].layers] == pytest.approx([0.5] * 4)
    assert [cost.backward_seconds for cost in refined.costs[0].layers] == pytest.approx([2.5] * 4)
