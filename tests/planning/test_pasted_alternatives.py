"""Each alternative, pasted back as keywords of plan(), gives a plan with the step and the memory that it shows."""

from typing import Any

import pytest

import pipepart
from pipepart import Cluster, Profile
from tests.planning.problems import Layer, profile_of

LAYERS = [
    Layer(cost, 2 * cost, 1 + cost % 3, parameters=5, output=4, saved=8, waiting=3, split=0.1)
    for cost in (3, 1, 4, 1, 5, 9, 2, 6)
]
PROFILE = profile_of(LAYERS, [4, 8])

REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a searched order": {"schedule": "search"},
    "a named schedule": {"schedule": "interleaved-1f1b"},
    "any number of stages": {"schedule": "1f1b", "stages": "auto"},
    "replicas": {"schedule": "1f1b", "replicas": "auto"},
    "recompute": {"recompute": "except-last", "max_micro_batches": 4},
    "constraints": {"colocate": [["layer4", "layer5"]], "pin": {"layer0": 0}, "no_cut_before": ["layer2"]},
    "the loss of the whole mini-batch": {"reduction": "batch"},
}


def check_alternatives(profile: Profile, cluster: Cluster, **request: Any) -> int:
    plan = pipepart.plan(profile, cluster, **request)
    shown = [other for other in plan.alternatives if other.step_seconds is not None]
    for other in shown:
        pasted = pipepart.plan(profile, cluster, **{**request, **other.keywords})
        assert pasted.predicted.step_seconds == pytest.approx(other.step_seconds, rel=1e-9), other
        assert max(pasted.predicted.memory_bytes) == other.memory_bytes, other
        assert (pasted.schedule, pasted.micro_batches) == (other.schedule, other.micro_batches)
        assert (len(pasted.stages), pasted.replicas) == (other.stages, other.replicas)
    return len(shown)


@pytest.mark.parametrize("request_of", REQUESTS)
def test_each_alternative_gives_the_plan_that_it_shows(request_of):
    cluster = Cluster.parse(["1KiB", "1KiB@0.5"], link="50B/s", latency=0.01)
    assert check_alternatives(PROFILE, cluster, **REQUESTS[request_of])


def test_each_alternative_that_needs_recompute_gives_the_plan_that_it_shows():
    assert check_alternatives(PROFILE, Cluster.parse(["190B"] * 2)) > 2


def test_each_alternative_that_may_offload_gives_the_plan_that_it_shows():
    cluster = Cluster.parse(["190B"] * 2, host_link=30.0)
    assert check_alternatives(PROFILE, cluster, micro_batches=8) > 2


def test_alternatives_that_were_not_planned_to_the_end_are_not_faster():
    """What their keywords give takes at least as long as the row says, or does not fit."""
    cluster = Cluster.parse(["1KiB", "1KiB@0.5"], link="50B/s", latency=0.01)
    plan = pipepart.plan(PROFILE, cluster)
    others = [other for other in plan.alternatives if other.step_seconds is None]
    assert others
    for other in others:
        try:
            pasted = pipepart.plan(PROFILE, cluster, **other.keywords)
        except pipepart.InfeasiblePlanError:
            assert "does not fit" in other.why
        else:
            assert other.why.startswith("at least ")
            assert pasted.predicted.step_seconds >= plan.predicted.step_seconds * (1 - 1e-9)
            assert pasted.schedule == other.schedule
