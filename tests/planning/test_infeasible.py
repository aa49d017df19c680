"""The error of a model that does not fit: which device, how many bytes, and plans that would fit."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
from pipepart import Cluster, InfeasiblePlanError, Plan, Profile
from pipepart.planning import PlanOptions
from pipepart.planning.request import read_request
from pipepart.planning.search.candidate import candidates_of
from pipepart.planning.search.cut_search import CutSearch
from pipepart.planning.search.parts import parts_of
from pipepart.planning.suggestions import shown_of
from pipepart.units import format_bytes, format_seconds
from tests.planning.problems import Layer, chains, clusters, profile_of


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """The suggestions do not depend on the machine."""
    monkeypatch.setattr("pipepart.planning.planner.EXPLAINING_SHARE", 60.0)


LAYERS = [Layer(parameters=10, output=20, saved=40)] * 8


def refused(profile: Profile, cluster: Cluster, **options: Any) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile, cluster, **options)
    return caught.value


def test_the_reason_names_the_stages_of_a_device_and_the_other_devices_that_are_short():
    profile = profile_of([Layer(parameters=10)] * 4)
    error = refused(profile, Cluster.parse(["79B", "200B"]), schedule="zb-v")
    assert error.deficit_bytes == 1
    assert (
        "with 4 stages, 4 micro-batches and schedule 'zb-v', stage 0 (layer0) and 3 (layer3) on device:0 "
        "is short by 1 byte at best: it needs 80 (80 B: 80 B of parameters" in str(error)
    )
    profile = profile_of([Layer(parameters=10)] * 2)
    error = refused(profile, Cluster.parse(["39B", "37B"]), schedule="1f1b", stages=2)
    assert "has 37 (37 B); also short: device:0 by 1 byte. " in str(error)


@given(
    layers=chains(sharing=True),
    cluster=clusters(),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zb-v"]),
)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_exists_where_weights_exceed_the_memory(layers, cluster, schedule):
    """Such devices are not searched, as forty layers of 40 bytes of state on four devices of 200 bytes."""
    options = PlanOptions(schedule=schedule)
    for part in parts_of(read_request(profile_of(layers, [4]), cluster, options)):
        if not part.holds_weights:
            cuts = [CutSearch(each).best_cut() for each in candidates_of(part)]
            assert all(cut is None or cut.deficit > 0 for cut in cuts)
    many, small = profile_of([Layer(parameters=10)] * 40), Cluster.parse(["200B"] * 4)
    assert not any(part.holds_weights for part in parts_of(read_request(many, small, options)))


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


_LINE = re.compile(r"  \d+\. (.+): (.+) a step( \(estimated: profile this size\))?, at most (.+) on a device")


def pasted(error: InfeasiblePlanError, profile: Profile, cluster: Cluster, **options: Any) -> list[Plan]:
    """Make the plan of each line of the message, as a reader would, and compare it with what the line says."""
    plans = []
    for line in str(error).splitlines()[1:]:
        match = _LINE.fullmatch(line)
        assert match, line
        known = {"pipepart": pipepart, "profile": profile, "cluster": cluster}
        changed = eval(f"dict({match[1]})", known)
        plan = pipepart.plan(**{"profile": profile, "cluster": cluster, **options, **changed})
        assert format_seconds(plan.predicted.step_seconds) == match[2]
        assert format_bytes(max(plan.predicted.memory_bytes)) == match[4]
        limits = [device.memory_bytes or 0 for device in plan.cluster.devices]
        assert all(size <= limit for size, limit in zip(plan.predicted.memory_bytes, limits, strict=True))
        plans.append(plan)
    assert [plan.predicted for plan in plans] == [one.plan.predicted for one in shown_of(error.suggestions)]
    return plans


REQUESTS: list[dict[str, Any]] = [
    {"schedule": "gpipe", "recompute": "never"},
    {"schedule": "looped-bfs", "chunks": 2, "recompute": "never"},
    {"schedule": "gpipe", "stages": 2, "recompute": "never"},
    {"schedule": "interleaved-1f1b", "chunks": 2, "stages": 4, "recompute": "never", "micro_batches": 4},
    {"schedule": "zb-v", "recompute": "never"},
    {"recompute": "never", "replicas": 2},
    {"recompute": "never", "colocate": [["layer3", "layer4"]]},
    {"schedule": "search", "recompute": "never", "colocate": [["layer0", "layer1"]]},
    {"reduction": "batch", "recompute": "never"},
]


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ("330B", {"schedule": "1f1b", "stages": 1}),
        ("30B", REQUESTS[0]),
        *(pytest.param("330B", options, marks=pytest.mark.slow) for options in REQUESTS),
    ],
    ids=str,
)
def test_each_line_gives_the_plan_that_it_promises(memory, options):
    """From memory that a change of the options is enough for to memory that holds no layer."""
    profile = profile_of(LAYERS, [4, 8])
    cluster = Cluster.parse([memory, memory], link="1KB/s", latency=0.1)
    error = refused(profile, cluster, **options)
    assert error.reason in str(error)
    assert "\n" not in error.reason
    assert pasted(error, profile, cluster, **options)


TIED = [*[Layer(parameters=10)] * 5, Layer(parameters=10, shares_with=(0,))]
KEEPING = [Layer(8.0, 8.0, 8.0, saved=60, output=4)] * 4


@pytest.mark.parametrize(
    ("layers", "options", "change", "command_line"),
    [
        (LAYERS, {"schedule": "gpipe", "recompute": "never"}, "recompute='auto'", "--recompute auto"),
        (LAYERS, {"schedule": "1f1b", "stages": 1}, "stages='auto'", "--stages auto"),
        (LAYERS, {"schedule": "1f1b", "replicas": 2}, "replicas=1", "--replicas 1"),
        (TIED, {"schedule": "1f1b", "stages": 2}, "allow_split_ties=True", "--allow-split-ties"),
        (
            KEEPING,
            {"schedule": "gpipe", "recompute": "never", "offload": "never"},
            "offload='auto'",
            "--offload auto",
        ),
    ],
)  # fmt: skip
def test_what_limits_the_request_is_set_free(layers, options, change, command_line):
    cluster = Cluster.parse(["420B", "420B"], host_link=200.0)
    error = refused(profile_of(layers, [4]), cluster, **options)
    assert (change, command_line) in [(one.change, one.command_line) for one in error.suggestions]
    pasted(error, profile_of(layers, [4]), cluster, **options)


def test_the_shortest_step_comes_first_and_more_devices_last():
    profile, cluster = shrinking(batch=64, counts=(2, 4, 8)), Cluster.parse(["900B", "900B"])
    error = refused(profile, cluster, micro_batches=2, recompute="never")
    inside = [suggestion for suggestion in error.suggestions if not suggestion.devices]
    seconds = [suggestion.step_seconds for suggestion in inside]
    assert seconds == sorted(seconds)
    estimated = {suggestion.plan.micro_batches for suggestion in inside if suggestion.estimated}
    assert estimated == {16, 32, 64}
    assert error.suggestions[-1].devices
    assert len(pasted(error, profile, cluster, micro_batches=2, recompute="never")) == 5
    last = str(error).splitlines()[-1]
    assert last.startswith("  5. cluster=cluster.with_more(")


@pytest.mark.parametrize(
    ("layers", "devices", "change", "command_line", "most"),
    [
        # Twelve layers of 40 bytes of state each: no device holds more than two of them.
        (
            [Layer(parameters=10)] * 12,
            ["100B"] * 4,
            "with_more(2), schedule=",
            "--schedule 1f1b --more-devices 2",
            80,
        ),
        ([Layer(), Layer(parameters=1000)], ["100B", "300B"], "with_memory(4000)", "--memory 4000", 4000),
    ],
)
def test_as_few_further_devices_as_do_or_larger_ones(layers, devices, change, command_line, most):
    profile, cluster = profile_of(layers, [1]), Cluster.parse(devices)
    schedule = "auto" if "more" in change else "1f1b"
    error = refused(profile, cluster, schedule=schedule)
    (only,) = error.suggestions
    assert only.change.startswith(f"cluster=cluster.{change}")
    assert only.command_line == command_line
    assert max(only.plan.predicted.memory_bytes) == most
    larger = "nor do four times as many devices. Use larger devices:\n  1. "
    assert (larger in str(error)) == ("memory" in change)
    pasted(error, profile, cluster, schedule=schedule)


def test_a_search_that_is_out_of_time_says_so():
    """It plans one small candidate, and looks for no changes."""
    cluster = Cluster.parse(["1GiB"] * 2)
    assert pipepart.plan(profile_of(LAYERS), cluster, seconds=1e-9).out_of_time
    error = refused(profile_of(LAYERS), Cluster.parse(["170B"] * 2), seconds=1e-9)
    assert error.reason.startswith("no plan that fits was found in time: with ")
    assert error.deficit_bytes > 0
    assert not error.suggestions
    assert str(error).endswith("call plan with more seconds")
    many = profile_of(LAYERS * 30, [128])
    error = refused(many, Cluster.parse(["1GiB"] * 240), stages=240, seconds=1e-9)
    assert "in time: to plan 240 stages and 128 micro-batches takes about " in error.reason


def test_more_devices_and_memory_leave_the_rest_of_the_cluster():
    cluster = Cluster.parse(["1GiB", "2GiB@0.5", "2GiB"], link="1GB/s")
    more = cluster.with_more(2)
    assert [device.name for device in more.devices[3:]] == ["device:2 (added 1)", "device:2 (added 2)"]
    assert (more.devices[:3], more.link) == (cluster.devices, cluster.link)
    larger = cluster.with_memory("3GiB")
    assert {device.memory_bytes for device in larger.devices} == {3 * 2**30}
    assert [device.speed for device in larger.devices] == [1, 0.5, 1]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        cluster.with_more(0)
