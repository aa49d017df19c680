"""replan() makes what plan() would make with the same keywords and the measured costs."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

import pipepart
from pipepart import Cluster, Plan
from pipepart.planning import PlanOptions, refine, replan
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
