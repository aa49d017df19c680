"""Plans whose stages keep their stashes on the host: when they are chosen, and what is predicted."""

from typing import Any

import pytest

from pipepart import Cluster, Plan, plan
from pipepart.planning import InfeasiblePlanError
from tests.planning.problems import Layer, profile_of

# For one micro-batch: a forward of a second, a backward of two, and 100 bytes to keep.
LAYER = Layer(forward=8.0, backward_input=8.0, backward_weight=8.0, saved=100, output=10)
PROFILE = profile_of([LAYER] * 4, micro_batches=(8,))


def cluster(memory: str = "1000B", host_link: float | None = 200.0, devices: int = 2) -> Cluster:
    return Cluster.parse([memory] * devices, host_link=host_link)


def planned(where: Cluster, **options: Any) -> Plan:
    return plan(PROFILE, where, **{"schedule": "gpipe", **options})


def modes(made: Plan) -> list[str]:
    return [stage.mode for stage in made.stages]


def test_a_fast_link_is_better_than_a_second_forward():
    """A stash is copied in a second, beside actions of two and four seconds: nothing waits."""
    free = planned(cluster("10000B"))
    made = planned(cluster())
    assert modes(free) == ["never", "never"]
    assert modes(made) == ["offload", "offload"]
    assert made.predicted.step_seconds == pytest.approx(free.predicted.step_seconds)
    assert max(made.predicted.memory_bytes) <= 1000 < min(free.predicted.memory_bytes)
    assert made.predicted.step_seconds < planned(cluster(), offload="never").predicted.step_seconds
    assert modes(planned(cluster(), offload="never")) == ["except-last", "except-last"]


def test_a_slow_link_is_worse_than_a_second_forward():
    slow = cluster(host_link=30.0)
    made, never = planned(slow), planned(slow, recompute="never")
    assert "offload" not in modes(made)
    assert modes(never) == ["offload", "offload"]
    assert never.predicted.step_seconds > made.predicted.step_seconds
    copy = (never.stages[0].stash_bytes - never.stages[0].boundary_bytes) / 30
    assert never.predicted.step_seconds > 2 * 8 * copy  # the queue of a device carries each stash twice


def test_without_a_link_or_if_it_is_forbidden_nothing_is_offloaded():
    for where, options in ((cluster(host_link=None), {}), (cluster(), {"offload": "never"})):
        with pytest.raises(InfeasiblePlanError, match="does not fit"):
            planned(where, recompute="never", **options)


def test_what_would_fit_with_offload_says_so():
    with pytest.raises(InfeasiblePlanError) as caught:
        planned(cluster(), recompute="never", offload="never", cut_before=["layer2"])
    found = next(one for one in caught.value.suggestions if one.options.get("offload") == "auto")
    made = planned(cluster(), recompute="never", cut_before=["layer2"])
    assert made.predicted.step_seconds == pytest.approx(found.plan.predicted.step_seconds)


def test_all_stages_offload_if_that_is_asked_for():
    """The worker of a virtual device copies by itself and is busy meanwhile, at 10 GB/s."""
    assert modes(planned(cluster("10000B"), offload="stash")) == ["offload", "offload"]
    layer = Layer(forward=8.0, backward_input=8.0, backward_weight=8.0, saved=10**9)
    made = plan(profile_of([layer] * 2, (8,)), Cluster.virtual(2), schedule="gpipe", offload="stash")
    assert modes(made) == ["offload", "offload"]
    costs = made.stage_costs()
    assert costs.host_copy == (0, 0)
    assert costs.offload == pytest.approx((0.1, 0.1), rel=1e-2)
