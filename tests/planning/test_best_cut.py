"""The cut of a plan is the best there is, and a byte decides what fits: against every cut, order and mode there is."""

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import schedules
from pipepart import Cluster, Device
from pipepart.planning.request import ASYNCHRONOUS, CHUNKS
from tests.planning.problems import Layer, chains, clusters
from tests.planning.ways import check_against_every_way, enlarged, least_shortage

ALONE = [*(name for name, chunks in CHUNKS.items() if chunks is None), *ASYNCHRONOUS]
TOGETHER = [name for name, chunks in CHUNKS.items() if chunks is not None]

alone = {
    "layers": chains(most=5, sharing=True),
    "cluster": clusters(),
    "name": st.sampled_from(ALONE),
    "micro_batches": st.integers(1, 8),
    "recompute": st.sampled_from(["auto", "auto", "never", "except-last", "always"]),
    "stages": st.integers(1, 4),
    "loss_seconds": st.sampled_from([0.0, 3.0]),
    "spare": st.one_of(st.none(), st.integers(-2, 2)),
}
together = {**alone, "layers": chains(most=6), "cluster": clusters(most=3), "name": st.sampled_from(TOGETHER)}


def check(layers, cluster, name, micro_batches, recompute, stages, loss_seconds, spare, chunks=1) -> None:
    """Check the plan for the memory as drawn, or for ``spare`` bytes more than the least that allows one."""
    devices = min(stages, len(layers) // chunks, len(cluster))
    assume(devices >= chunks)
    try:
        built = schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks)
    except schedules.ScheduleError:
        assume(False)
        return
    if spare is not None:
        least = least_shortage(layers, cluster, built, recompute)
        assume(abs(least) < 10**6)
        more = int(least) + spare
        assume(all(d.memory_bytes is None or d.memory_bytes + more > 0 for d in cluster.devices))
        cluster = enlarged(cluster, more)
    check_against_every_way(layers, cluster, built, recompute, chunks, loss_seconds)


def sized(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


# A layer that has only the weight of an earlier one, and so keeps nothing from I to W.
only_shared = {
    "layers": [
        Layer(saved=5, waiting=3, parameters=2, keeps_input=True, output=4),
        Layer(backward_input=0.0, backward_weight=1.0, waiting=20, shares_with=(0,)),
    ],
    "cluster": Cluster(devices=(Device(name="device:0", kind="made up", memory_bytes=1),)),
    "name": "zb-h1",
    "micro_batches": 2,
    "recompute": "never",
    "stages": 1,
    "loss_seconds": 0.0,
}


@given(**alone)
@example(**only_shared, spare=0)
@example(**only_shared, spare=-1)
@sized(30)
def test_no_way_that_fits_has_a_smaller_bottleneck(**drawn):
    check(**drawn)


@given(**together)
@sized(10)
def test_a_plan_with_several_stages_a_device_is_found_where_one_fits(**drawn):
    check(**drawn, chunks=2)


@pytest.mark.slow
@given(**alone)
@sized(250)
def test_no_way_of_thousands_has_a_smaller_bottleneck(**drawn):
    check(**drawn)


@pytest.mark.slow
@given(**together)
@sized(100)
def test_many_plans_with_several_stages_a_device_are_found_where_one_fits(**drawn):
    check(**drawn, chunks=2)
