"""The error of a model that does not fit: which device, how many bytes, what for, and how sure that is."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
from pipepart import Cluster, Device, InfeasiblePlanError
from pipepart.planning import PlanOptions
from pipepart.planning.infeasible import exceeds_memory
from pipepart.planning.request import Request, read_request
from pipepart.planning.search.strategies import search
from schedules.searching.clock import Clock
from tests.planning.problems import Layer, chains, clusters, profile_of
from tests.planning.ways import check_memory


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


def test_one_of_anything_is_in_the_singular():
    error = infeasible([Layer(parameters=5)], limited(19), micro_batches=1, schedule="1f1b")
    assert str(error).startswith(
        "the model does not fit: with 1 stage, 1 micro-batch and schedule '1f1b', stage 0 (layer layer0) on device:0 "
        "is short by 1 byte at best: it needs 20 (20 B: 20 B of parameters, gradients, optimizer state and buffers, "
        "0 B kept for the backward of 1 micro-batch, 0 B of workspace) and has 19 (19 B). "
    )


def test_what_a_stage_keeps_with_recompute_is_told():
    """Of four micro-batches in flight the input of 5 bytes, and of one the 20 bytes that are made of it."""
    layers = [Layer(output=5, saved=20, keeps_input=True)] * 2
    error = infeasible(layers, limited(30, 30), recompute="always", schedule="gpipe", stages=2)
    assert (error.stage, error.deficit_bytes) == (1, 10)
    assert (
        "40 B kept for the backward of 4 micro-batches (recompute='always'), 0 B of workspace) and has 30"
        in str(error)
    )


def test_the_stages_of_a_device_are_told_together():
    layers = [Layer(parameters=10)] * 4
    error = infeasible(layers, limited(79, 200), schedule="zb-v")
    assert error.deficit_bytes == 1
    assert (
        "with 4 stages, 4 micro-batches and schedule 'zb-v', device:0 with stages 0 (layer layer0) and 3 (layer "
        "layer3) is short by 1 byte at best: it needs 80 (80 B: 80 B of parameters" in str(error)
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


def test_of_a_search_that_leaves_cuts_out_only_the_best_cut_found_is_told(monkeypatch):
    layers = [Layer(parameters=10)] * 8
    exact = infeasible(layers, limited(100, 100), schedule="interleaved-1f1b")
    assert "is short by 60 bytes at best: it needs 160" in str(exact)
    monkeypatch.setattr("pipepart.planning.search.cut_search._EFFORT", 34)  # there are 35 cuts
    found = infeasible(layers, limited(100, 100), schedule="interleaved-1f1b")
    assert "is short by 60 bytes in the best cut found: it needs 160" in str(found)


def test_only_the_devices_that_are_short_run_forwards_again():
    profile = profile_of([Layer(saved=100, output=1)] * 4, [4])
    free = pipepart.plan(profile, limited(None, None), schedule="interleaved-1f1b")
    assert free.predicted.memory_bytes == (503, 306)
    plan = pipepart.plan(profile, limited(502, 502), schedule="interleaved-1f1b")
    assert [(stage.device, stage.recompute) for stage in plan.stages] == [
        ("device:0", "except-last"),
        ("device:1", "never"),
    ] * 2
    assert plan.predicted.memory_bytes == (304, 306)  # one message more waits than with equal stages
    check_memory(plan)


def request_of(layers: list[Layer], cluster: Cluster, schedule: str) -> Request:
    return read_request(profile_of(layers, [4]), cluster, PlanOptions(schedule=schedule))


def test_weights_that_exceed_the_memory_are_known_without_a_search():
    """Ten layers of 40 bytes of state: a device of 70 bytes has room for a single one, whatever the bytes of all."""
    layers = [Layer(parameters=10)] * 10
    for count, schedule, exceeds in (
        (5, "auto", True),
        (7, "auto", False),
        (7, "1f1b", True),
        (7, "interleaved-1f1b", False),
        (10, "1f1b", False),
    ):
        assert exceeds_memory(request_of(layers, limited(*[70] * count), schedule)) == exceeds
    assert exceeds_memory(request_of([Layer(parameters=10)], limited(39, 39), "auto"))
    assert not exceeds_memory(request_of(layers, limited(10, None), "auto"))


@given(
    layers=chains(sharing=True),
    cluster=clusters(),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zb-v"]),
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_exists_where_weights_exceed_the_memory(layers, cluster, schedule):
    request = request_of(layers, cluster, schedule)
    if exceeds_memory(request):
        assert search(request, Clock()) is None
