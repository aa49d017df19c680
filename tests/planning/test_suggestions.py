"""What would make a model fit: each change is planned, fits, and is what plan() then gives."""

import pytest

import pipepart
from pipepart import Cluster, InfeasiblePlanError, Profile
from pipepart.planning.feasibility.suggestions import Suggestion
from tests.planning.problems import Layer, profile_of

LAYERS = [Layer(parameters=10, output=20, saved=40)] * 8


def suggestions_of(cluster: Cluster, counts=(4,), layers=LAYERS, **options) -> tuple[Suggestion, ...]:
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile_of(layers, counts), cluster, **options)
    return caught.value.suggestions


def shrinking(batch: int, counts: tuple[int, ...]) -> Profile:
    """A profile whose micro-batches keep the less the smaller they are."""
    costs = []
    for count in counts:
        layers = [Layer(parameters=10, output=80 // count, saved=640 // count)] * 8
        (one,) = profile_of(layers, [count]).costs
        costs.append(one.model_copy(update={"samples": batch // count}))
    return profile_of([Layer(parameters=10)] * 8, counts).model_copy(
        update={"batch": batch, "costs": tuple(costs)}
    )


def test_each_change_gives_the_plan_that_it_promises():
    cluster = Cluster.parse(["420B", "420B"])
    profile = profile_of(LAYERS, [4])
    found = suggestions_of(cluster, schedule="gpipe", recompute="never")
    assert {tuple(suggestion.options) for suggestion in found} >= {("recompute",), ("schedule",)}
    for suggestion in found:
        if suggestion.estimated:
            continue
        larger = Cluster(devices=(*cluster.devices, *suggestion.devices), link=cluster.link)
        plan = pipepart.plan(
            profile, larger, **{"schedule": "gpipe", "recompute": "never", **suggestion.options}
        )
        assert plan.predicted == suggestion.plan.predicted
        assert max(plan.predicted.memory_bytes) <= 420


def test_what_was_measured_comes_before_estimates_and_near_ones_before_far_ones():
    profile = shrinking(batch=64, counts=(2, 4, 8))
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile, Cluster.parse(["900B", "900B"]), micro_batches=2, recompute="never")
    inside = [suggestion for suggestion in caught.value.suggestions if not suggestion.devices]
    assert [
        (suggestion.plan.micro_batches, suggestion.estimated) for suggestion in inside if suggestion.estimated
    ] == [
        (16, True),
        (32, True),
        (64, True),
    ]
    assert [suggestion.estimated for suggestion in inside] == sorted(
        suggestion.estimated for suggestion in inside
    )
    measured = [suggestion.step_seconds for suggestion in inside if not suggestion.estimated]
    assert len(measured) >= 2
    assert measured == sorted(measured)
    last = caught.value.suggestions[-1]
    assert last.devices  # more devices come last


def test_as_few_further_devices_as_do():
    """Twelve layers of 40 bytes of state each: no device holds more than two of them."""
    layers = [Layer(parameters=10)] * 12
    (only,) = suggestions_of(Cluster.parse(["100B"] * 4), (1,), layers)
    assert len(only.devices) == 2
    assert len(only.plan.stages) == 6
    assert max(only.plan.predicted.memory_bytes) == 80


def test_one_layer_that_fits_nowhere_has_no_suggestion():
    with pytest.raises(InfeasiblePlanError, match="use larger devices") as caught:
        pipepart.plan(profile_of([Layer(), Layer(parameters=1000)], [1]), Cluster.parse(["100B", "100B"]))
    assert caught.value.suggestions == ()
