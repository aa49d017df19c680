"""Replicas of the model: as many as are asked for, with devices for each stage that are as alike as possible."""

import itertools

import pytest

import pipepart
import schedules
from pipepart import Cluster, Plan
from tests.planning.problems import Layer, profile_of

LAYERS = [Layer(1 + i % 3, 1, 1, parameters=4, output=5, saved=10) for i in range(8)]


def on_devices(plan: Plan) -> list[tuple[str, ...]]:
    return [tuple(stage.device for stage in plan.stages), *plan.replica_devices]


def test_each_copy_has_devices_of_its_own_and_its_part_of_the_micro_batches():
    plan = pipepart.plan(profile_of(LAYERS, [8]), Cluster.parse(["1GiB"] * 6), schedule="1f1b", replicas=3)
    assert len(plan.stages) == 2
    assert sorted(itertools.chain(*on_devices(plan))) == [f"device:{index}" for index in range(6)]
    order = plan.build_schedule()
    schedules.check(order)
    forwards = [sum(str(a).endswith(f"F{k}") for a in row) for row in order.actions for k in range(8)]
    assert sum(forwards) == 2 * 8  # each micro-batch once through the two stages of one copy


def test_a_copy_takes_as_long_as_the_model_alone_with_its_micro_batches():
    """Devices that are alike, links that cost nothing: four copies of one stage do two micro-batches each."""
    profile = profile_of(LAYERS, [8])
    plan = pipepart.plan(profile, Cluster.parse(["1GiB"] * 4), replicas=4)
    assert plan.predicted.step_seconds == pytest.approx(profile_seconds() * 2 / 8)
    assert plan.predicted.serial_seconds == pytest.approx(profile_seconds())


def profile_seconds() -> float:
    return sum(layer.forward + layer.backward_input + layer.backward_weight for layer in LAYERS)


def test_devices_of_a_stage_are_as_alike_as_possible():
    cluster = Cluster.parse(["1GiB@2", "1GiB@0.5", "1GiB@2", "1GiB@0.5"])
    plan = pipepart.plan(profile_of(LAYERS, [4]), cluster, replicas=2, schedule="1f1b")
    for devices in zip(*on_devices(plan), strict=True):
        assert len({cluster.device(name).speed for name in devices}) == 1
    alone = pipepart.plan(profile_of(LAYERS, [2]), Cluster.parse(["1GiB@2", "1GiB@0.5"]), schedule="1f1b")
    assert [stage.layers for stage in plan.stages] == [stage.layers for stage in alone.stages]


def test_auto_is_no_slower_than_any_number_of_copies(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 0.0)  # no deadline ends a search on a busy machine
    profile, cluster = (
        profile_of(LAYERS, [4, 8]),
        Cluster.parse(["200B", "300B", "200B@2", "300B"], link=100.0),
    )
    best = pipepart.plan(profile, cluster, replicas="auto")
    for count in (1, 2, 4):
        try:
            plan = pipepart.plan(profile, cluster, replicas=count)
        except pipepart.InfeasiblePlanError:
            continue
        assert best.predicted.step_seconds <= plan.predicted.step_seconds * (1 + 1e-9)


def test_gradients_that_cost_much_to_sum_leave_one_copy():
    layers = [Layer(1 + i % 3, 1, 1, parameters=100_000, output=5) for i in range(8)]
    profile = profile_of(layers, [8])
    assert pipepart.plan(profile, Cluster.parse(["1GiB"] * 2, link=1e9), replicas="auto").replicas == 2
    assert pipepart.plan(profile, Cluster.parse(["1GiB"] * 2, link=1e4), replicas="auto").replicas == 1


@pytest.mark.parametrize("cap", [0, 1])
def test_a_byte_decides_whether_copies_fit(cap):
    roomy = pipepart.plan(profile_of(LAYERS, [4]), Cluster.parse(["1GiB"] * 4), replicas=2, schedule="gpipe")
    need = max(roomy.predicted.memory_bytes)
    options = {"replicas": 2, "schedule": "gpipe", "recompute": "never"}
    cluster = Cluster.parse([f"{need - cap}B"] * 4)
    if cap:
        with pytest.raises(pipepart.InfeasiblePlanError):
            pipepart.plan(profile_of(LAYERS, [4]), cluster, **options)
    else:
        found = pipepart.plan(profile_of(LAYERS, [4]), cluster, **options).predicted
        assert found.model_copy(update={"found_for": roomy.predicted.found_for}) == roomy.predicted


def test_a_plan_of_copies_comes_back_from_a_file(tmp_path):
    plan = pipepart.plan(profile_of(LAYERS, [4]), Cluster.parse(["1GiB"] * 4, link=50.0), replicas=2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("replicas", [0, -1, 5, True, 1.5, "many"])
def test_a_number_that_cannot_be_is_refused(replicas):
    with pytest.raises(ValueError, match="replicas must be between 1 and the number of devices, 4"):
        pipepart.plan(profile_of(LAYERS, [4]), Cluster.parse(["1GiB"] * 4), replicas=replicas)


def test_fewer_micro_batches_than_copies_are_refused():
    with pytest.raises(pipepart.InfeasiblePlanError, match="1 micro-batch cannot be shared by 2 replicas"):
        pipepart.plan(profile_of(LAYERS, [1]), Cluster.parse(["1GiB"] * 2), replicas=2)
