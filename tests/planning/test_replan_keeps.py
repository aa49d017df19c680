"""replan() makes what plan() would make with the same keywords and the measured costs."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

import pipepart
from pipepart import Cluster, Plan
from pipepart.planning import PlanOptions, refine, replan
from pipepart.profiling import Timing
from tests.planning.measured_steps import cluster_of, measured, true_layers
from tests.planning.problems import Layer, profile_of

COUNTS = [2, 4, 8]
THREE = cluster_of(1, 1, 1)


def layer_stages(plan: Plan) -> dict[str, int]:
    """The stage of each layer."""
    return {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}


def begins(plan: Plan) -> list[str]:
    return [stage.layers[0] for stage in plan.stages[1:]]


# The keywords of a plan, and what is true of every plan that keeps them.
CASES: dict[str, tuple[dict, Callable[[Plan], bool]]] = {
    "any schedule": ({}, lambda plan: len(plan.alternatives) > 3),
    "a searched order": ({"schedule": "search"}, lambda plan: plan.schedule == "search"),
    "a named schedule": ({"schedule": "sequential"}, lambda plan: plan.schedule == "sequential"),
    "fewer stages": ({"schedule": "1f1b", "stages": 2}, lambda plan: len(plan.stages) == 2),
    "any number of stages": (
        {"schedule": "gpipe", "stages": "auto"},
        lambda plan: plan.schedule == "gpipe" and any(other.stages == 1 for other in plan.alternatives),
    ),
    "chunks": ({"schedule": "interleaved-1f1b", "chunks": 3}, lambda plan: plan.chunks == 3),
    "replicas": ({"schedule": "1f1b", "replicas": 3}, lambda plan: plan.replicas == 3),
    "any number of replicas": (
        {"schedule": "1f1b", "replicas": "auto"},
        lambda plan: {plan.replicas, *(other.replicas for other in plan.alternatives)} == {1, 3},
    ),
    "micro-batches": ({"schedule": "1f1b", "micro_batches": 2}, lambda plan: plan.micro_batches == 2),
    "at most so many micro-batches": (
        {"schedule": "1f1b", "max_micro_batches": 4},
        lambda plan: {plan.micro_batches, *(other.micro_batches for other in plan.alternatives)} == {2, 4},
    ),
    "pin": ({"schedule": "1f1b", "pin": {"layer9": 1}}, lambda plan: layer_stages(plan)["layer9"] == 1),
    "colocate": (
        {"schedule": "1f1b", "colocate": [["layer1", "layer9"]]},
        lambda plan: layer_stages(plan)["layer1"] == layer_stages(plan)["layer9"],
    ),
    "no cut": (
        {"schedule": "1f1b", "no_cut_before": [f"layer{at}" for at in range(3, 9)]},
        lambda plan: not set(begins(plan)) & {f"layer{at}" for at in range(3, 9)},
    ),
    "the whole cut": (
        {"schedule": "1f1b", "cut_before": ["layer1", "layer2"]},
        lambda plan: begins(plan) == ["layer1", "layer2"],
    ),
    "recompute": (
        {"schedule": "1f1b", "recompute": "except-last"},
        lambda plan: {stage.recompute for stage in plan.stages} == {"except-last"},
    ),
    "the loss of the whole mini-batch": (
        {"reduction": "batch"},
        lambda plan: (
            {plan.schedule, *(other.schedule for other in plan.alternatives)}
            <= {"gpipe", "looped-bfs", "sequential"}
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_made_again_keeps_what_was_asked(case, tmp_path):
    options, kept = CASES[case]
    layers = true_layers(12)
    profile = profile_of(layers, COUNTS)
    first = pipepart.plan(profile, THREE, **options)
    assert kept(first)
    # The layers in front are three times as slow as was thought.
    true = [
        replace(layer, forward=3 * layer.forward, backward_input=3 * layer.backward_input)
        for layer in layers[:4]
    ] + layers[4:]
    trace = measured(first, profile_of(true, COUNTS))
    again = replan(first, trace, profile)
    assert kept(again)
    assert again == pipepart.plan(refine(profile, first, trace), THREE, **options)
    assert again.constraints == first.constraints
    first.save(tmp_path / "plan.json")
    assert replan(Plan.load(tmp_path / "plan.json"), trace, profile) == again


def test_layers_that_share_parameters_may_stay_apart():
    layers = [Layer(parameters=1)] * 5 + [Layer(parameters=1, shares_with=(0,))]
    profile = profile_of(layers)
    split = pipepart.plan(
        profile, Cluster.parse(["1GiB", "1GiB"]), schedule="1f1b", stages=2, allow_split_ties=True
    )
    assert len(replan(split, split.simulate()).stages) == 2
    assert replan(split, split.simulate()) == split


def test_keywords_of_the_call_replace_those_of_the_plan():
    profile = profile_of(true_layers(12), COUNTS)
    three = pipepart.plan(profile, THREE, schedule="interleaved-1f1b", chunks=3, micro_batches=8)
    trace = three.simulate()
    assert replan(three, trace, schedule="1f1b") == replan(three, trace, schedule="1f1b", chunks=None)
    assert replan(three, trace, profile, micro_batches=2).micro_batches == 2
    assert replan(three, trace, chunks=2).chunks == 2
    assert replan(three, trace, chunks=2).constraints.chunks == 2


def test_a_plan_keeps_every_keyword():
    """A keyword that a plan forgets would be lost when it is made again."""
    signature = inspect.signature(pipepart.plan)
    keywords = {
        name: one.default
        for name, one in signature.parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert {field.name: field.default for field in fields(PlanOptions)} == keywords


def test_sets_of_layers_are_kept_in_order():
    profile = profile_of([Layer(parameters=1)] * 6)
    plan = pipepart.plan(
        profile,
        Cluster.virtual(2),
        colocate=[{"layer3", "layer1", "layer2"}],
        no_cut_before={"layer5", "layer4"},
    )
    assert plan.constraints.colocate == (("layer1", "layer2", "layer3"),)
    assert plan.constraints.no_cut_before == ("layer4", "layer5")
    assert list(plan.constraints.given) == ["colocate", "no_cut_before"]


def test_the_order_of_a_branched_model_is_chosen_again():
    """The plan has the layers in another order than the profile; its own profile has that order only."""
    layers = true_layers(8)
    profile = profile_of(layers, [4, 8], loss_seconds=3)
    pairs = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6), (4, 7), (5, 7), (6, 7)]
    edges = tuple((f"layer{one}", f"layer{other}") for one, other in pairs)
    profile = profile.model_copy(update={"edges": edges})
    cluster = cluster_of(1, 1, latency=0.1, bandwidth=10.0)
    first = pipepart.plan(profile, cluster, schedule="1f1b")
    assert first.profile is not None
    assert first.profile.layers != profile.layers
    assert replan(first, first.simulate(), profile).predicted.step_seconds == pytest.approx(
        first.predicted.step_seconds, rel=1e-9
    )
    slow = {"layer1": 3.0, "layer4": 3.0}
    costs = [
        cost.model_copy(update={"forward": Timing(seconds=slow.get(info.name, 1.0) * cost.forward.seconds)})
        for info, cost in zip(first.profile.layers, first.profile.costs[0].layers, strict=True)
    ]
    true = first.profile.costs[0].model_copy(update={"layers": tuple(costs)})
    trace = measured(first, first.profile.model_copy(update={"costs": (true,)}))
    again = replan(first, trace, profile)
    assert again == pipepart.plan(refine(profile, first, trace), cluster, schedule="1f1b")
    assert again.edges == edges
    assert again.predicted.step_seconds <= trace.makespan * (1 + 1e-9)
