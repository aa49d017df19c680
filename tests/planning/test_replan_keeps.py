"""What is kept of a request: in the file of its plan, in its alternatives, and when it is made again from a step."""

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

import pipepart
from pipepart import Cluster, Plan, Profile
from pipepart.planning import PlanOptions, refine, replan
from tests.planning.measured_steps import measured
from tests.planning.problems import Layer, profile_of

COUNTS = [2, 4]
LAYERS = [
    Layer(cost, 2 * cost, 1 + cost % 3, parameters=5, output=4, saved=8, waiting=3, split=0.1)
    for cost in (3, 1, 4, 1, 5, 2)
]
TWO = Cluster.parse(["1KiB", "1KiB@0.5"], link="50B/s", latency=0.01)


# The keywords of a plan.
CASES: dict[str, dict[str, Any]] = {
    "any schedule": {},
    "a searched order": {"schedule": "search", "micro_batches": 2},
    "any number of stages": {"schedule": "gpipe", "stages": "auto"},
    "chunks": {"schedule": "interleaved-1f1b", "chunks": 3},
    "any number of replicas": {"schedule": "1f1b", "replicas": "auto"},
    "colocate": {"schedule": "1f1b", "colocate": [{"layer4", "layer1"}]},
    "the whole cut": {"schedule": "1f1b", "cut_before": ["layer1"]},
    "recompute": {"schedule": "1f1b", "recompute": "except-last"},
    "stages shared by two devices": {"tensor": 2, "shard": True, "replicas": 2, "stages": 1},
    "compressed messages": {"schedule": "1f1b", "compress": "int8"},
    "the loss of the whole mini-batch": {"reduction": "batch"},
}


def cluster_of(options: dict[str, Any]) -> Cluster:
    return Cluster.parse(["1KiB"] * 4, link="50B/s") if "tensor" in options else TWO


@pytest.mark.parametrize("case", CASES)
def test_a_plan_made_again_keeps_what_was_asked(case, tmp_path):
    options = CASES[case]
    profile, cluster = profile_of(LAYERS, COUNTS), cluster_of(options)
    first = pipepart.plan(profile, cluster, **options)
    first.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == first
    # The layers in front are three times as slow as was thought.
    slow = [
        replace(one, forward=3 * one.forward, backward_input=3 * one.backward_input) for one in LAYERS[:2]
    ]
    trace = measured(first, profile_of([*slow, *LAYERS[2:]], COUNTS))
    again = replan(loaded, trace, profile)
    assert again == pipepart.plan(refine(profile, first, trace), cluster, **options)
    assert again.constraints == first.constraints


def check_alternatives(profile: Profile, cluster: Cluster, **request: Any) -> int:
    """Each alternative, pasted back as keywords, gives a plan with the step and the memory that it shows."""
    plan = pipepart.plan(profile, cluster, **request)
    shown = [other for other in plan.alternatives if other.step_seconds is not None]
    for other in shown:
        pasted = pipepart.plan(profile, cluster, **{**request, **other.keywords})
        assert pasted.predicted.step_seconds == pytest.approx(other.step_seconds, rel=1e-9), other
        assert max(pasted.predicted.memory_bytes) == other.memory_bytes, other
        assert (pasted.schedule, pasted.micro_batches) == (other.schedule, other.micro_batches)
        assert (len(pasted.stages), pasted.replicas) == (other.stages, other.replicas)
    return len(shown)


ALTERNATIVES = ["any number of stages", "any number of replicas", "the loss of the whole mini-batch"]


@pytest.mark.parametrize(
    "case", [case if case in ALTERNATIVES else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_each_alternative_gives_the_plan_that_it_shows(case):
    check_alternatives(profile_of(LAYERS, COUNTS), cluster_of(CASES[case]), **CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("host_link", [None, 30.0], ids=["recompute", "offload"])
def test_each_alternative_of_tight_memory_gives_the_plan_that_it_shows(host_link):
    cluster = Cluster.parse(["145B"] * 2, host_link=host_link)
    assert check_alternatives(profile_of(LAYERS, [8]), cluster) > 2


def test_alternatives_that_were_not_planned_to_the_end_are_not_faster():
    """What their keywords give takes at least as long as the row says, or does not fit."""
    profile = profile_of(LAYERS, COUNTS)
    plan = pipepart.plan(profile, TWO)
    others = [other for other in plan.alternatives if other.step_seconds is None]
    assert others
    for other in others:
        try:
            pasted = pipepart.plan(profile, TWO, **other.keywords)
        except pipepart.InfeasiblePlanError:
            assert "does not fit" in other.why
        else:
            assert other.why.startswith("at least ")
            assert pasted.predicted.step_seconds >= plan.predicted.step_seconds * (1 - 1e-9)
            assert pasted.schedule == other.schedule


def test_keywords_of_the_call_replace_those_of_the_plan():
    profile = profile_of(LAYERS, COUNTS)
    three = pipepart.plan(profile, TWO, schedule="interleaved-1f1b", chunks=3, micro_batches=4)
    trace = three.simulate()
    assert replan(three, trace, schedule="1f1b") == replan(three, trace, schedule="1f1b", chunks=None)
    assert replan(three, trace, profile, micro_batches=2).micro_batches == 2
    assert replan(three, trace, chunks=2).constraints.chunks == 2


def test_a_plan_keeps_every_keyword():
    """A keyword that a plan forgets would be lost when it is made again."""
    keywords = {
        name: one.default
        for name, one in inspect.signature(pipepart.plan).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert {field.name: field.default for field in fields(PlanOptions)} == keywords
