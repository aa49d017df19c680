"""Suggestions for a model that does not fit: plan() with the changed options gives the plan that was promised."""

import pytest

import pipepart
from pipepart import Cluster, InfeasiblePlanError, Profile
from pipepart.planning import Suggestion, estimate
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


def planned_as_suggested(profile: Profile, cluster: Cluster, suggestion: Suggestion, **options) -> None:
    """Following the suggestion gives its plan: the model fits, in the step that was promised."""
    larger = Cluster(devices=(*cluster.devices, *suggestion.devices), link=cluster.link)
    if suggestion.estimated:
        count = suggestion.plan.micro_batches
        profile = profile.model_copy(update={"costs": (*profile.costs, estimate(profile, count))})
    plan = pipepart.plan(profile, larger, **{**options, **suggestion.options})
    assert plan.predicted == suggestion.plan.predicted
    limits = [device.memory_bytes or 0 for device in larger.devices]
    assert all(size <= limit for size, limit in zip(plan.predicted.memory_bytes, limits, strict=True))


def test_each_change_gives_the_plan_that_it_promises():
    cluster = Cluster.parse(["420B", "420B"])
    options = {"schedule": "gpipe", "recompute": "never"}
    found = suggestions_of(cluster, **options)
    assert {tuple(suggestion.options) for suggestion in found} >= {("recompute",), ("schedule",)}
    for suggestion in found:
        planned_as_suggested(profile_of(LAYERS, [4]), cluster, suggestion, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "looped-bfs", "chunks": 2, "recompute": "never"},
        {"schedule": "gpipe", "stages": 2, "max_micro_batches": 4, "recompute": "never"},
        {"schedule": "interleaved-1f1b", "chunks": 2, "stages": 4, "recompute": "never", "micro_batches": 4},
    ],
)
def test_a_change_resets_the_options_that_contradict_it(options):
    """Another schedule takes no chunks, and a larger number of micro-batches no upper limit below it."""
    cluster = Cluster.parse(["400B", "400B"])
    profile = profile_of(LAYERS, [4, 8])
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile, cluster, **options)
    assert caught.value.suggestions
    assert caught.value.reason in str(caught.value)
    assert "Changes that fit" not in caught.value.reason
    for suggestion in caught.value.suggestions:
        planned_as_suggested(profile, cluster, suggestion, **options)


def test_stages_that_shared_parameters_forbid_are_allowed_by_an_option():
    layers = [Layer(parameters=10), *[Layer(parameters=10)] * 4, Layer(parameters=10, shares_with=(0,))]
    options = {"schedule": "1f1b", "stages": 2}
    cluster = Cluster.parse(["4KiB", "4KiB"])
    found = suggestions_of(cluster, (4,), layers, **options)
    assert dict(found[0].options) == {"allow_split_ties": True}
    planned_as_suggested(profile_of(layers, [4]), cluster, found[0], **options)


def test_the_shortest_step_comes_first_and_more_devices_last():
    profile = shrinking(batch=64, counts=(2, 4, 8))
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile, Cluster.parse(["900B", "900B"]), micro_batches=2, recompute="never")
    inside = [suggestion for suggestion in caught.value.suggestions if not suggestion.devices]
    seconds = [suggestion.step_seconds for suggestion in inside]
    assert seconds == sorted(seconds)
    estimated = {suggestion.plan.micro_batches for suggestion in inside if suggestion.estimated}
    assert estimated == {16, 32, 64}
    assert caught.value.suggestions[-1].devices


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
