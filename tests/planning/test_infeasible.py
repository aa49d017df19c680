"""The error of a model that does not fit: which device, how many bytes, and plans that would fit."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
from pipepart import Cluster, Device, InfeasiblePlanError, Plan, Profile
from pipepart.planning import PlanOptions
from pipepart.planning.request import Request, read_request
from pipepart.planning.search.candidate import candidates_of
from pipepart.planning.search.cut_search import CutSearch
from pipepart.planning.search.parts import parts_of
from pipepart.planning.suggestions import shown_of
from pipepart.units import format_bytes, format_seconds
from tests.planning.problems import Layer, chains, clusters, profile_of


def limited(*sizes: int | None) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(name=f"device:{index}", kind="made up", memory_bytes=size)
            for index, size in enumerate(sizes)
        )
    )


def infeasible(
    layers: list[Layer], cluster: Cluster, micro_batches: int = 4, **options
) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile_of(layers, [micro_batches]), cluster, **options)
    return caught.value


def test_the_stages_of_a_device_are_told_together():
    layers = [Layer(parameters=10)] * 4
    error = infeasible(layers, limited(79, 200), schedule="zb-v")
    assert error.deficit_bytes == 1
    assert (
        "with 4 stages, 4 micro-batches and schedule 'zb-v', stage 0 (layer0) and 3 (layer3) on device:0 "
        "is short by 1 byte at best: it needs 80 (80 B: 80 B of parameters" in str(error)
    )


def test_others_that_are_short_are_told():
    error = infeasible([Layer(parameters=10)] * 2, limited(39, 37), schedule="1f1b", stages=2)
    assert "has 37 (37 B); also short: device:0 by 1 byte. " in str(error)


def test_a_device_that_is_short_alone_needs_just_that():
    """Five bytes more for the small one make a plan, four do not; the other one has enough."""
    layers = [Layer(parameters=10)] * 2
    error = infeasible(layers, limited(35, 1000), schedule="1f1b", stages=2)
    assert error.deficit_bytes == 5
    pipepart.plan(profile_of(layers), limited(40, 1000), schedule="1f1b", stages=2)
    assert infeasible(layers, limited(39, 1000), schedule="1f1b", stages=2).deficit_bytes == 1


def request_of(layers: list[Layer], cluster: Cluster, schedule: str) -> Request:
    return read_request(profile_of(layers, [4]), cluster, PlanOptions(schedule=schedule))


@given(
    layers=chains(sharing=True),
    cluster=clusters(),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zb-v"]),
)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_exists_where_weights_exceed_the_memory(layers, cluster, schedule):
    for part in parts_of(request_of(layers, cluster, schedule)):
        if not part.holds_weights:
            cuts = [CutSearch(each).best_cut() for each in candidates_of(part)]
            assert all(cut is None or cut.deficit > 0 for cut in cuts)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """The suggestions do not depend on the machine."""
    monkeypatch.setattr("pipepart.planning.planner.EXPLAINING_SHARE", 60.0)


LAYERS = [Layer(parameters=10, output=20, saved=40)] * 8


def refused(profile: Profile, cluster: Cluster, **options: Any) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile, cluster, **options)
    return caught.value


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


def test_what_limits_the_request_is_set_free():
    profile, cluster = profile_of(LAYERS, [4]), Cluster.parse(["420B", "420B"])
    for options, change in (
        ({"schedule": "gpipe", "recompute": "never"}, "recompute='auto'"),
        ({"schedule": "1f1b", "stages": 1}, "stages='auto'"),
        ({"schedule": "1f1b", "replicas": 2}, "replicas=1"),
    ):
        found = refused(profile, cluster, **options).suggestions
        assert change in [one.change for one in found]


def test_layers_that_share_parameters_may_be_parted():
    layers = [Layer(parameters=10), *[Layer(parameters=10)] * 4, Layer(parameters=10, shares_with=(0,))]
    profile, cluster = profile_of(layers, [4]), Cluster.parse(["4KiB", "4KiB"])
    error = refused(profile, cluster, schedule="1f1b", stages=2)
    assert "allow_split_ties=True" in [one.change for one in error.suggestions]
    assert "--allow-split-ties" in [one.command_line for one in error.suggestions]
    assert pasted(error, profile, cluster, schedule="1f1b", stages=2)


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


def test_as_few_further_devices_as_do():
    """Twelve layers of 40 bytes of state each: no device holds more than two of them."""
    profile, cluster = profile_of([Layer(parameters=10)] * 12, [1]), Cluster.parse(["100B"] * 4)
    error = refused(profile, cluster)
    (only,) = error.suggestions
    assert only.change == "cluster=cluster.with_more(2), schedule='1f1b'"
    assert only.command_line == "--schedule 1f1b --more-devices 2"
    assert len(only.plan.stages) == 6
    assert max(only.plan.predicted.memory_bytes) == 80
    pasted(error, profile, cluster)


def test_one_layer_that_fits_nowhere_needs_larger_devices():
    profile, cluster = profile_of([Layer(), Layer(parameters=1000)], [1]), Cluster.parse(["100B", "300B"])
    error = refused(profile, cluster, schedule="1f1b")
    assert [one.change for one in error.suggestions] == ["cluster=cluster.with_memory(4000)"]
    assert [one.command_line for one in error.suggestions] == ["--memory 4000"]
    assert "nor do four times as many devices. Use larger devices:\n  1. " in str(error)
    pasted(error, profile, cluster, schedule="1f1b")


def test_more_devices_and_memory_leave_the_rest_of_the_cluster():
    cluster = Cluster.parse(["1GiB", "2GiB@0.5", "2GiB"], link="1GB/s")
    more = cluster.with_more(2)
    assert [device.name for device in more.devices[3:]] == ["device:2 (added 1)", "device:2 (added 2)"]
    assert (more.devices[:3], more.link) == (cluster.devices, cluster.link)
    assert [device.name for device in more.with_more(1).devices[5:]] == ["device:2 (added 3)"]
    larger = cluster.with_memory("3GiB")
    assert {device.memory_bytes for device in larger.devices} == {3 * 2**30}
    assert [device.speed for device in larger.devices] == [1, 0.5, 1]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        cluster.with_more(0)


def test_a_model_whose_weights_alone_are_too_large_is_searched_for_on_more_devices_only(monkeypatch):
    """Forty layers of 40 bytes of state on four devices of 200 bytes: no search of these can find a plan."""
    searched = []

    def best_cut(search: CutSearch):
        searched.append(len(search._candidate.cluster))
        return best(search)

    best = CutSearch.best_cut
    monkeypatch.setattr(CutSearch, "best_cut", best_cut)
    error = refused(
        profile_of([Layer(parameters=10)] * 40, [4]), Cluster.parse(["200B"] * 4), schedule="gpipe"
    )
    assert [len(one.devices) for one in error.suggestions] == [4]
    assert set(searched) == {8}
