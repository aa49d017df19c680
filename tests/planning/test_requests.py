"""Requests that used to fail or to plan something else: replicas with a searched order, replan, named schedules."""

import numpy as np
import pytest

import pipepart
from pipepart import Cluster, Link, Plan
from pipepart.graph_partition.device_orders import all_orders
from tests.planning.problems import Layer, profile_of


def test_a_searched_order_works_with_replicas():
    profile = profile_of([Layer(parameters=4, output=8)] * 8, [8])
    named = pipepart.plan(profile, Cluster.virtual(4), replicas=2)
    plan = pipepart.plan(profile, Cluster.virtual(4), schedule="search", replicas=2)
    assert plan.schedule == "search"
    assert plan.replicas == 2
    assert plan.predicted.step_seconds <= named.predicted.step_seconds * (1 + 1e-9)
    assert plan.refreshed() is plan


def test_search_is_no_slower_than_auto_with_split_backwards():
    layers = [Layer(1.0, 1.0, 1.0, parameters=4, output=8, saved=16, waiting=20, split=0.02)] * 8
    profile = profile_of(layers, [4])
    named = pipepart.plan(profile, Cluster.virtual(2))
    found = pipepart.plan(profile, Cluster.virtual(2), schedule="search")
    assert found.predicted.step_seconds <= named.predicted.step_seconds * (1 + 1e-9)


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


def test_all_orders_of_eight_unlike_devices_are_searched():
    """Eight unlike devices have 1,024 edges; 10,864 if each pair has a link of its own."""
    unlike = [(device,) for device in range(8)]
    with_links = all_orders(unlike, 8, links=np.arange(64).reshape(8, 8), most_edges=20_000)
    assert with_links.complete
    assert len(with_links.state) == 10_864
    assert len(all_orders(unlike, 8).state) == 1_024
    assert not all_orders(unlike, 8, most_edges=1_000).complete


def test_devices_may_have_different_numbers_of_stages():
    """Three stages on two devices, in an order written by hand."""
    profile = profile_of([Layer(parameters=1)] * 3, [2])
    made = pipepart.plan(profile, Cluster.virtual(3), schedule="1f1b", stages=3)
    names = ("virtual:0", "virtual:1", "virtual:0")
    stages = tuple(
        stage.model_copy(update={"device": name}) for stage, name in zip(made.stages, names, strict=True)
    )
    actions = (
        ("0F0", "0F1", "2F0", "2B0", "2F1", "2B1", "0B0", "0B1"),
        ("1F0", "1F1", "1B0", "1B1"),
    )
    update = {"stages": stages, "schedule": "search", "actions": actions, "prediction": None}
    plan = Plan(**{**dict(made), **update}).refreshed()
    assert plan.predicted.memory_bytes[0] == plan.device_bytes()["virtual:0"]
    assert [stage.device for stage in plan.stages] == list(names)
    loads = plan.stages[0].load_seconds + plan.stages[2].load_seconds
    assert plan.predicted.bottleneck_seconds == pytest.approx(loads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, Cluster.virtual(1)), "plan needs a Profile, as pipepart.profile returns it, got None"),
        (
            (profile_of([Layer()]), 2),
            "plan needs a Cluster, got 2: write for example pipepart.Cluster.virtual",
        ),
    ],
)
def test_other_arguments_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        pipepart.plan(*arguments)


def test_a_number_of_devices_is_an_int():
    with pytest.raises(TypeError, match="must be an int, got '2'"):
        Cluster.virtual("2")  # type: ignore[arg-type]


def test_printing_a_plan_takes_a_line_a_stage():
    plan = pipepart.plan(profile_of([Layer(parameters=1)] * 300, [4]), Cluster.virtual(2), schedule="1f1b")
    lines = str(plan).splitlines()
    assert lines[0].startswith("Plan '1f1b', 4 micro-batches, 2 stages: ")
    assert lines[1].startswith("  stage 0 on virtual:0: layer0 to layer149 (150 layers), ")
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pin": {"layer0": 5}},
            "pin has layer 'layer0' in stage 5, and schedule 'auto' has at most 5 stages",
        ),
        ({"pin": {"layer3": 2}, "schedule": "1f1b"}, "has at most 2 stages on 2 devices"),
        (
            {"pin": {"layer0": 1}},
            "pin has layer 'layer0' in stage 1, and only 0 layers for the stages before it",
        ),
        ({"schedule": "zb-v", "chunks": 3}, "zb-v needs chunks=2, got chunks=3"),
    ],
)
def test_what_no_memory_could_make_possible_is_a_wrong_request(options, message):
    profile = profile_of([Layer()] * 5, [4])
    with pytest.raises(ValueError, match=message) as caught:
        pipepart.plan(profile, Cluster.virtual(2), **options)
    assert not isinstance(caught.value, pipepart.InfeasiblePlanError)


def test_a_whole_cut_and_another_number_of_stages_contradict_each_other():
    profile = profile_of([Layer()] * 5)
    with pytest.raises(ValueError, match=r"cut_before is the whole cut and makes 3 stages, got stages=2"):
        pipepart.plan(profile, Cluster.virtual(3), cut_before=["layer2", "layer4"], stages=2)
    plan = pipepart.plan(profile, Cluster.virtual(3), cut_before=["layer2", "layer4"], stages=3)
    assert [stage.layers[0] for stage in plan.stages] == ["layer0", "layer2", "layer4"]
