"""The cut of a plan is the best there is: against every cut there is."""

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import pipepart
from pipepart import Cluster, InfeasiblePlanError, Link, Plan
from tests.planning.problems import Layer, chains, clusters, every_cut, profile_of
from tests.planning.ways import partitioned

SCHEDULES = st.sampled_from(["1f1b", "gpipe", "sequential"])


def check_against_every_cut(layers, cluster, schedule, micro_batches, stages, loss_seconds) -> None:
    stages = min(stages, len(layers), len(cluster))
    profile = profile_of(layers, [micro_batches], loss_seconds, input_bytes=7)
    candidates = list(
        every_cut(
            layers, cluster, stages, schedule=schedule, micro_batches=micro_batches,
            loss_seconds=loss_seconds, input_bytes=7,
        )
    )  # fmt: skip
    fitting = [candidate.bottleneck for candidate in candidates if candidate.shortage <= 0]
    options = {"schedule": schedule, "micro_batches": micro_batches, "stages": stages, "recompute": "never"}
    if fitting:
        plan = partitioned(profile, cluster, **options)
        assert isinstance(plan, Plan)
        assert len(plan.stages) == stages
        assert plan.predicted.bottleneck_seconds == pytest.approx(min(fitting), rel=1e-12, abs=1e-12)
        assert [name for stage in plan.stages for name in stage.layers] == [
            layer.name for layer in profile.layers
        ]
        assert plan.predicted.bottleneck_optimal
        assert len({stage.device for stage in plan.stages}) == stages
        return
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile, cluster, **options)
    expected = min((candidate.shortage for candidate in candidates), default=0)
    # More messages may wait in the step of the nearest cut than in one whose stages take equal times.
    assert caught.value.deficit_bytes >= expected
    assert caught.value.deficit_bytes == expected or "at best" not in str(caught.value)
    assert str(int(caught.value.deficit_bytes)) in str(caught.value) or not candidates


problems = {
    "layers": chains(sharing=True),
    "cluster": clusters(),
    "schedule": SCHEDULES,
    "micro_batches": st.integers(1, 6),
    "stages": st.integers(1, 4),
    "loss_seconds": st.sampled_from([0.0, 3.0]),
}


@given(**problems)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_no_cut_that_fits_has_a_smaller_bottleneck(
    layers, cluster, schedule, micro_batches, stages, loss_seconds
):
    """Unlike speeds, memory limits, links and layers that stay together; where none fits, the least shortage."""
    check_against_every_cut(layers, cluster, schedule, micro_batches, stages, loss_seconds)


@pytest.mark.slow
@given(**{**problems, "layers": chains(most=9, sharing=True)})
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_cut_of_thousands_has_a_smaller_bottleneck(
    layers, cluster, schedule, micro_batches, stages, loss_seconds
):
    check_against_every_cut(layers, cluster, schedule, micro_batches, stages, loss_seconds)


@given(layers=chains(), cluster=clusters(limited=False), micro_batches=st.integers(1, 6))
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_memory_without_limit_always_fits(layers, cluster, micro_batches):
    assume(len(cluster) <= len(layers))
    plan = pipepart.plan(profile_of(layers, [micro_batches]), cluster, schedule="1f1b", stages=len(cluster))
    assert {stage.device for stage in plan.stages} == {device.name for device in cluster.devices}


def test_a_heavy_layer_stands_alone():
    layers = [Layer(forward=cost) for cost in (1, 1, 1, 8, 1, 1)]
    plan = pipepart.plan(profile_of(layers), Cluster.virtual(3), schedule="1f1b")
    assert [stage.layers for stage in plan.stages] == [
        ("layer0", "layer1", "layer2"),
        ("layer3",),
        ("layer4", "layer5"),
    ]


def test_a_slow_device_gets_less():
    layers = [Layer(forward=1, backward_input=0)] * 12
    cluster = Cluster.parse(["1GiB@0.5", "1GiB", "1GiB@1.5"])
    plan = pipepart.plan(profile_of(layers, [64]), cluster, schedule="1f1b")
    assert [len(stage.layers) for stage in plan.stages] == [2, 4, 6]
    assert [stage.forward_seconds for stage in plan.stages] == pytest.approx([4 / 64] * 3)


def test_an_expensive_border_is_avoided():
    layers = [Layer(output=size) for size in (10, 1000, 10, 1000)]
    cluster = Cluster(devices=Cluster.virtual(2).devices, link=Link(bandwidth=100))
    plan = pipepart.plan(profile_of(layers, [1]), cluster, schedule="1f1b", stages=2)
    assert plan.stages[0].layers in (("layer0",), ("layer0", "layer1", "layer2"))


def test_the_time_of_the_loss_counts_for_the_last_stage():
    layers = [Layer()] * 6
    two = {"schedule": "1f1b", "stages": 2}
    without = pipepart.plan(profile_of(layers, [4]), Cluster.virtual(2), **two)
    loaded = pipepart.plan(profile_of(layers, [4], loss_seconds=4), Cluster.virtual(2), **two)
    assert [len(stage.layers) for stage in without.stages] == [3, 3]
    assert [len(stage.layers) for stage in loaded.stages] == [4, 2]


def test_layers_that_share_a_parameter_stay_in_one_stage():
    layers = [Layer(), Layer(), Layer(forward=9), Layer(shares_with=(1,)), Layer()]
    plan = pipepart.plan(profile_of(layers), Cluster.virtual(3), schedule="1f1b")
    assert [stage.layers for stage in plan.stages] == [
        ("layer0",),
        ("layer1", "layer2", "layer3"),
        ("layer4",),
    ]


def test_sharing_from_end_to_end_leaves_one_stage():
    layers = [Layer(), Layer(), Layer(shares_with=(0,))]
    plan = pipepart.plan(profile_of(layers), Cluster.virtual(2))
    assert len(plan.stages) == 1
    with pytest.raises(InfeasiblePlanError, match="no cut into 2 stages is possible"):
        pipepart.plan(profile_of(layers), Cluster.virtual(2), stages=2)


def test_a_long_chain_is_cut_in_time():
    """Three hundred layers into eight stages on unlike devices: no search over all cuts would end."""
    layers = [Layer(forward=1 + index % 7, output=index % 11) for index in range(300)]
    cluster = Cluster.parse([f"1GiB@{speed}" for speed in (1, 0.5, 2, 1, 1, 0.25, 1, 1)], link=1000.0)
    plan = pipepart.plan(profile_of(layers, [64]), cluster, schedule="1f1b")
    loads = [stage.load_seconds for stage in plan.stages]
    assert plan.predicted.bottleneck_seconds == pytest.approx(max(loads))
    ideal = sum(layer.forward + layer.backward_input for layer in layers) / 64 / 7.75
    assert ideal <= max(loads) <= 1.2 * ideal
    for (index, stage), (_, behind) in itertools.pairwise(enumerate(plan.stages)):
        assert stage.layers, index
        assert int(stage.layers[-1].removeprefix("layer")) + 1 == int(behind.layers[0].removeprefix("layer"))
