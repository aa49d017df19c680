"""A plan: what it predicts, how it is chosen, and which requests are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Cluster, Device, Link, Plan
from pipepart.graph_partition.device_orders import distinct_orders
from pipepart.planning import StagePlan
from pipepart.planning.request import ASYNCHRONOUS, CHUNKS
from tests.planning.problems import Layer, profile_of

pytestmark = pytest.mark.usefixtures("short_profiles")


def cluster_of(count: int, latency: float = 0.0, bandwidth: float | None = None) -> Cluster:
    devices = tuple(Device(name=f"device:{index}", kind="made up") for index in range(count))
    return Cluster(devices=devices, link=Link(latency=latency, bandwidth=bandwidth))


EQUAL = [Layer(forward=1, backward_input=1, backward_weight=1)] * 8


@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 2), (2, 8), (4, 2), (8, 4)])
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


def test_a_slow_device_is_left_out_and_named():
    cluster = Cluster.parse(["1GiB", "1GiB@0.05", "1GiB"])
    plan = pipepart.plan(profile_of(EQUAL, [4]), cluster, schedule="1f1b")
    assert [stage.device for stage in plan.stages] == ["device:0", "device:2"]
    assert plan.unused_devices == ("device:1",)
    assert str(plan).splitlines()[-1] == "  without device:1: the step would not be shorter"
    assert len(pipepart.plan(profile_of(EQUAL, [4]), cluster, schedule="1f1b", stages=3).stages) == 3


def test_one_device_is_best_where_every_border_costs_more_than_it_gains():
    profile = profile_of([Layer(output=1000, parameters=1)] * 4, [4])
    slow = cluster_of(4, bandwidth=10.0)
    assert len(pipepart.plan(profile, slow).stages) == 1
    assert len(pipepart.plan(profile, slow, schedule="1f1b", stages=4).stages) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzag"}, r"'zigzag': choose one of 1f1b, gpipe, eager-1f1b"),
        ({"micro_batches": 0}, r"micro_batches must be 'auto' or a whole number of at least 1, got 0"),
        ({"micro_batches": "some"}, r"got 'some'"),
        ({"micro_batches": 3}, r"measured for \[4\] micro-batches, not for 3"),
        ({"stages": 9}, r"between 1 and 8 .* got 9"),
        ({"stages": 3, "schedule": "1f1b"}, r"between 1 and 2 .* got 3"),
        ({"stages": True}, r"got True"),
        ({"replicas": 3}, "replicas must be between 1 and the number of devices, 2"),
        ({"replicas": 1.5}, "replicas must be between 1 and the number of devices, 2"),
        ({"schedule": "zb-v", "chunks": 3}, "zb-v needs chunks=2, got chunks=3"),
        ({"cut_before": ["layer2"], "stages": 3}, "is the whole cut and makes 2 stages, got stages=3"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_values(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        pipepart.plan(profile_of(EQUAL), cluster_of(2), **options)
    assert not isinstance(caught.value, pipepart.InfeasiblePlanError)


def test_a_plan_by_hand_has_no_prediction():
    stage = StagePlan(layers=("a",), device="device:0")
    plan = Plan(stages=(stage,), cluster=cluster_of(1), schedule="1f1b", micro_batches=1)
    with pytest.raises(ValueError, match="no prediction"):
        _ = plan.predicted
    assert plan.prediction is None


def test_a_searched_order_works_with_replicas():
    profile = profile_of([Layer(parameters=4, output=8)] * 4, [4])
    named = pipepart.plan(profile, Cluster.virtual(4), replicas=2)
    plan = pipepart.plan(profile, Cluster.virtual(4), schedule="search", replicas=2)
    assert plan.schedule == "search"
    assert plan.replicas == 2
    assert plan.predicted.step_seconds <= named.predicted.step_seconds * (1 + 1e-9)
    assert plan.refreshed() is plan


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_named_schedule_is_no_slower_than_any_cut_of_it(name):
    """Few micro-batches and unequal layers: the smallest bottleneck has not the shortest step."""
    layers = [
        Layer(forward=cost, backward_input=2 * cost, parameters=1, output=cost) for cost in (1, 5, 2, 4, 1)
    ]
    profile = profile_of(layers, [2])
    cluster = Cluster(devices=Cluster.virtual(2).devices, link=Link(bandwidth=1.0))
    plan = pipepart.plan(profile, cluster, schedule=name)
    cuts = [pipepart.plan(profile, cluster, schedule=name, cut_before=[f"layer{i}"]) for i in range(1, 5)]
    assert plan.predicted.step_seconds == min(cut.predicted.step_seconds for cut in cuts)


def test_devices_may_have_different_numbers_of_stages():
    """Three stages on two devices, in an order written by hand."""
    profile = profile_of([Layer(parameters=1)] * 3, [2])
    made = pipepart.plan(profile, Cluster.virtual(3), schedule="1f1b", stages=3)
    names = ("virtual:0", "virtual:1", "virtual:0")
    stages = tuple(
        stage.model_copy(update={"device": name}) for stage, name in zip(made.stages, names, strict=True)
    )
    actions = (("0F0", "0F1", "2F0", "2B0", "2F1", "2B1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    update = {"stages": stages, "schedule": "search", "actions": actions, "prediction": None}
    plan = Plan(**{**dict(made), **update}).refreshed()
    assert plan.predicted.memory_bytes[0] == plan.device_bytes()["virtual:0"]
    assert [stage.device for stage in plan.stages] == list(names)
    loads = plan.stages[0].load_seconds + plan.stages[2].load_seconds
    assert plan.predicted.bottleneck_seconds == pytest.approx(loads)


def test_other_arguments_are_named():
    profile: Any = profile_of([Layer()])
    with pytest.raises(TypeError, match=r"plan needs a Profile, as pipepart.profile returns it, got None"):
        pipepart.plan(None, Cluster.virtual(1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        TypeError, match=r"needs a Cluster, got 2: write for example pipepart.Cluster.virtual"
    ):
        pipepart.plan(profile, 2)  # pyright: ignore[reportArgumentType]


def test_what_changes_the_numbers_or_takes_two_copies_is_planned_only_if_named():
    assert not {*CHUNKS} & {*ASYNCHRONOUS, "chimera"}


def test_printing_a_plan_takes_a_line_a_stage():
    plan = pipepart.plan(profile_of([Layer(parameters=1)] * 300, [4]), Cluster.virtual(2), schedule="1f1b")
    lines = str(plan).splitlines()
    assert lines[0].startswith("Plan '1f1b', 4 micro-batches, 2 stages: ")
    assert lines[1].startswith("  stage 0 on virtual:0: layer0 to layer149 (150 layers), ")
    assert len(lines) == 3


class NeverRuns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model was run")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "1f1c"}, "schedule '1f1c'"),
        ({"schedule": "pipedream"}, "pipedream"),
        ({"recompute": "often"}, "got 'often'"),
        ({"replicas": 3}, "replicas must be between 1 and the number of devices, 2"),
        ({"optimizer_state": "lion"}, "optimizer 'lion' is not known"),
        ({"micro_batches": 0}, "micro_batches"),
    ],
)
def test_a_mistake_is_reported_before_the_model_runs(options: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), NeverRuns())
    given: dict[str, Any] = {"loss_fn": nn.MSELoss(), "target": torch.zeros(8, 4), "devices": 2}
    with pytest.raises(ValueError, match=says):
        pipepart.Pipeline.auto(model, torch.zeros(8, 4), **given | options)


@pytest.mark.timeout(30)
def test_few_layers_on_many_devices_have_a_plan():
    profile = profile_of([Layer(output=10)] * 14, [8])
    plan = pipepart.plan(profile, Cluster.virtual(16), seconds=0.3)
    assert plan.predicted.step_seconds < plan.predicted.serial_seconds


def test_orders_of_thousands_of_devices_are_made():
    assert next(distinct_orders(Cluster.virtual(1100), 1100)) == tuple(range(1100))


def test_devices_with_other_runtimes_are_not_alike():
    cluster = Cluster.virtual(2)
    slow = cluster.devices[1].model_copy(update={"action_seconds": 0.5})
    cluster = cluster.model_copy(update={"devices": (cluster.devices[0], slow)})
    assert list(distinct_orders(cluster, 2)) == [(0, 1), (1, 0)]
