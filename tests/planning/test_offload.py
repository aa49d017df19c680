"""Plans whose stages keep their stashes on the host: when they are chosen, what is promised, and what is refused."""

from typing import Any

import pytest
from rich.console import Console

import schedules
from pipepart import Cluster, Plan, plan
from pipepart.planning import InfeasiblePlanError
from pipepart.reporting import plan_reports
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
    assert (
        never.predicted.step_seconds
        == schedules.simulate(never.build_schedule(), never.stage_costs()).makespan
    )


def test_without_a_link_or_if_it_is_forbidden_nothing_is_offloaded():
    for where, options in ((cluster(host_link=None), {}), (cluster(), {"offload": "never"})):
        with pytest.raises(InfeasiblePlanError, match="does not fit"):
            planned(where, recompute="never", **options)


def test_what_would_fit_with_offload_says_so():
    with pytest.raises(InfeasiblePlanError) as caught:
        planned(cluster(), recompute="never", offload="never", cut_before=["layer2"])
    found = [one for one in caught.value.suggestions if one.options.get("offload") == "auto"]
    assert found
    assert planned(
        cluster(), recompute="never", cut_before=["layer2"]
    ).predicted.step_seconds == pytest.approx(found[0].plan.predicted.step_seconds)


def test_all_stages_offload_if_that_is_asked_for():
    made = planned(cluster("10000B"), offload="stash")
    assert modes(made) == ["offload", "offload"]
    assert modes(plan(PROFILE, Cluster.virtual(2), schedule="gpipe", offload="stash")) == [
        "offload",
        "offload",
    ]


def test_a_virtual_device_copies_by_itself():
    """Its worker is busy meanwhile, at 10 GB/s."""
    layer = Layer(forward=8.0, backward_input=8.0, backward_weight=8.0, saved=10**9)
    made = plan(profile_of([layer] * 2, (8,)), Cluster.virtual(2), schedule="gpipe", offload="stash")
    costs = made.stage_costs()
    assert costs.host_copy == (0, 0)
    assert costs.offload == pytest.approx((0.1, 0.1), rel=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "state"}, "offload must be one of 'auto', 'never', 'stash', got 'state'"),
        ({"offload": "stash", "recompute": "always"}, "choose one of the two"),
        ({"offload": "stash", "schedule": "pipedream"}, "asynchronous"),
        ({"recompute": "offload"}, "recompute must be one of 'auto', 'never', 'except-last', 'always'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        planned(cluster(), **options)


def test_a_link_that_is_not_known_is_asked_for():
    with pytest.raises(ValueError, match=r"between 'device:0' and its host.*host_link='25GB/s'"):
        planned(cluster(host_link=None), offload="stash")


def test_a_plan_keeps_its_modes_in_its_file_and_its_texts(tmp_path: Any):
    made = planned(cluster())
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert str(made).count("offloads its stash") == 2
    console = Console(width=140, record=True)
    for report in plan_reports(made):
        console.print(report)
    text = " ".join(console.export_text().split())
    assert "offload stages 0, 1" in text
