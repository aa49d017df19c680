"""A plan: what it predicts, how the best is chosen, and the value that is saved."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import pipepart
import schedules
from pipepart import Cluster, Device, InfeasiblePlanError, Link, Plan
from pipepart.planning import StagePlan
from pipepart.planning.request import CHUNKS
from tests.planning.problems import Layer, chains, clusters, profile_of

SCHEDULES = ["1f1b", "gpipe", "sequential"]


def cluster_of(count: int, latency: float = 0.0, bandwidth: float | None = None) -> Cluster:
    devices = tuple(Device(name=f"device:{index}", kind="made up") for index in range(count))
    return Cluster(devices=devices, link=Link(latency=latency, bandwidth=bandwidth))


EQUAL = [Layer(forward=1, backward_input=1, backward_weight=1)] * 8


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_step_of_equal_stages_by_the_formulas_of_the_papers(devices, micro_batches):
    """GPipe and 1F1B: m + p - 1 turns of a stage; one after the other: m p turns."""
    profile = profile_of(EQUAL, [micro_batches])
    turn = 8 * 3 / devices / micro_batches
    even = [f"layer{first}" for first in range(0, 8, 8 // devices)][1:]
    for name in ("gpipe", "1f1b"):
        found = pipepart.plan(profile, cluster_of(devices), schedule=name, cut_before=even).predicted
        assert found.step_seconds == pytest.approx((micro_batches + devices - 1) * turn)
        assert found.bubble == pytest.approx((devices - 1) / (micro_batches + devices - 1))
    found = pipepart.plan(profile, cluster_of(devices), schedule="sequential", cut_before=even).predicted
    assert found.step_seconds == pytest.approx(micro_batches * devices * turn)
    assert found.bubble == pytest.approx(1 - 1 / devices)
    assert found.serial_seconds == pytest.approx(24)
    assert found.bottleneck_seconds == pytest.approx(turn)


def test_messages_cost_latency_and_bytes_over_bandwidth():
    layers = [Layer(output=100, parameters=1), Layer(output=5, parameters=1)]
    free = pipepart.plan(profile_of(layers, [1]), cluster_of(2), schedule="1f1b")
    paid = pipepart.plan(profile_of(layers, [1]), cluster_of(2, 0.5, 50.0), schedule="1f1b", stages=2)
    assert free.predicted.step_seconds == pytest.approx(4)
    assert paid.predicted.step_seconds == pytest.approx(4 + 2 * (0.5 + 100 / 50))
    assert [stage.transfer_seconds for stage in paid.stages] == pytest.approx([5, 5])


def test_no_gradient_crosses_a_border_behind_frozen_layers():
    layers = [Layer(output=100, parameters=1, trained=False), Layer(parameters=1)]
    plan = pipepart.plan(profile_of(layers, [1]), cluster_of(2, 0.5, 50.0), schedule="1f1b", stages=2)
    assert [stage.transfer_seconds for stage in plan.stages] == pytest.approx([2.5, 2.5])


CHOICES = {
    "layers": chains(sharing=True),
    "cluster": clusters(limited=False),
    "micro_batches": st.integers(1, 6),
}


@given(**CHOICES)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_auto_is_as_fast_as_the_best_of_its_choices(layers, cluster, micro_batches):
    check_auto(layers, cluster, micro_batches)


@pytest.mark.slow
@given(**CHOICES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_auto_is_as_fast_as_the_best_of_its_choices_for_many_chains(layers, cluster, micro_batches):
    check_auto(layers, cluster, micro_batches)


def check_auto(layers, cluster, micro_batches) -> None:
    """Schedule and micro-batches; never worse than the best of all, on however few devices."""
    assume(len(cluster) <= len(layers))
    counts = sorted({micro_batches, 1, 4})
    profile = profile_of(layers, counts)
    best = pipepart.plan(profile, cluster, allow_split_ties=True).predicted.step_seconds
    for name, count in itertools.product(CHUNKS, counts):
        try:
            one = pipepart.plan(profile, cluster, schedule=name, micro_batches=count, allow_split_ties=True)
        except InfeasiblePlanError:
            continue  # several stages a device, on one device
        assert best <= one.predicted.step_seconds * (1 + 1e-9)


def test_a_slow_device_is_left_out_and_named():
    cluster = Cluster.parse(["1GiB", "1GiB@0.05", "1GiB"])
    plan = pipepart.plan(profile_of(EQUAL, [4]), cluster, schedule="1f1b")
    assert [stage.device for stage in plan.stages] == ["device:0", "device:2"]
    assert plan.unused_devices == ("device:1",)
    assert str(plan).splitlines()[-1] == "  without device:1: the step would not be shorter"
    assert len(pipepart.plan(profile_of(EQUAL, [4]), cluster, schedule="1f1b", stages=3).stages) == 3


def test_auto_takes_the_number_of_stages_that_is_fastest():
    """A link so slow that every border costs more than it gains: one device is best."""
    layers = [Layer(output=1000, parameters=1)] * 4
    profile = profile_of(layers, [4])
    slow = cluster_of(4, bandwidth=10.0)
    assert len(pipepart.plan(profile, slow).stages) == 1
    assert len(pipepart.plan(profile, slow, stages=4).stages) == 4
    assert len({stage.device for stage in pipepart.plan(profile, cluster_of(4)).stages}) == 4
    assert len(pipepart.plan(profile, cluster_of(4), stages=3).stages) == 3


def test_the_simulation_of_a_plan_is_its_prediction():
    plan = pipepart.plan(profile_of(EQUAL, [4]), cluster_of(4, 0.1), schedule="1f1b")
    timeline = plan.simulate()
    assert timeline.makespan == plan.predicted.step_seconds
    assert timeline.schedule == plan.build_schedule()
    assert plan.build_schedule() == schedules.build(plan.schedule, devices=4, micro_batches=4)
    assert plan.build_schedule(2).micro_batches == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzag"}, r"'zigzag': choose one of 1f1b, gpipe, eager-1f1b"),
        ({"micro_batches": 0}, r"micro_batches must be 'auto' or a whole number of at least 1, got 0"),
        ({"micro_batches": -3}, r"got -3"),
        ({"micro_batches": "some"}, r"got 'some'"),
        ({"micro_batches": 3}, r"measured for \[4\] micro-batches, not for 3"),
        ({"stages": 0}, r"between 1 and 8 .* got 0"),
        ({"stages": 9}, r"between 1 and 8 .* got 9"),
        ({"stages": 3, "schedule": "1f1b"}, r"between 1 and 2 .* got 3"),
        ({"stages": True}, r"got True"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_values(options, message):
    with pytest.raises(ValueError, match=message):
        pipepart.plan(profile_of(EQUAL), cluster_of(2), **options)


def test_of_more_devices_than_layers_some_are_left_out():
    plan = pipepart.plan(profile_of(EQUAL), cluster_of(9))
    assert len(plan.stages) <= 8
    assert plan.unused_devices


def test_a_saved_plan_loads_as_the_same_value(tmp_path):
    plan = pipepart.plan(profile_of(EQUAL), cluster_of(4, 0.25, 3.5))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_an_edited_cut_is_accepted_and_the_same_schedule_is_built(tmp_path):
    """The file is there to be edited: a border moved by hand is a plan."""
    path = tmp_path / "plan.json"
    pipepart.plan(profile_of(EQUAL, [4]), cluster_of(2), schedule="1f1b").save(path)
    data = json.loads(path.read_text())
    moved = data["stages"][1]["layers"].pop(0)
    data["stages"][0]["layers"].append(moved)
    path.write_text(json.dumps(data))
    assert [len(stage.layers) for stage in Plan.load(path).stages] == [5, 3]


EDITS = {
    "unknown field": (lambda data: data.update(colour="blue"), "colour"),
    "unknown field of a stage": (lambda data: data["stages"][0].update(speed=1), r"stages\.0\.speed"),
    "later version": (lambda data: data.update(version=99), "version"),
    "no stages": (lambda data: data.update(stages=[]), "stages"),
    "empty stage": (lambda data: data["stages"][0].update(layers=[]), r"stages\.0\.layers"),
    "unknown device": (lambda data: data["stages"][1].update(device="gpu"), r"stage 1 is on device 'gpu'"),
    "unknown schedule": (lambda data: data.update(schedule="zigzag"), "'zigzag'"),
    "no micro-batches": (lambda data: data.update(micro_batches=0), "micro_batches"),
    "no devices": (lambda data: data["cluster"].update(devices=[]), r"cluster\.devices"),
    "two devices of a name": (
        lambda data: data["cluster"]["devices"][1].update(name="device:0"),
        "names must differ",
    ),
    "negative speed": (lambda data: data["cluster"]["devices"][0].update(speed=-1), "speed"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_that_was_edited_wrongly_is_refused_by_field(edit, tmp_path):
    change, words = EDITS[edit]
    path = tmp_path / "plan.json"
    pipepart.plan(profile_of(EQUAL), cluster_of(2)).save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"plan.json is (not )?a Plan(.|\n)*{words}"):
        Plan.load(path)


def test_a_plan_by_hand_has_no_prediction():
    stage = StagePlan(layers=("a",), device="device:0")
    plan = Plan(stages=(stage,), cluster=cluster_of(1), schedule="1f1b", micro_batches=1)
    with pytest.raises(ValueError, match="no prediction"):
        _ = plan.predicted
    assert plan.prediction is None


def test_stages_know_their_devices():
    plan = pipepart.plan(profile_of(EQUAL), cluster_of(3), schedule="1f1b")
    assert [device.name for device in plan.devices] == ["device:0", "device:1", "device:2"]
    assert [stage.device for stage in plan.stages] == [device.name for device in plan.devices]
