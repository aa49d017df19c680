"""The memory that a plan is made with is the memory that its schedule takes, to the byte, whatever runs again."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import schedules
from pipepart.planning.request import ASYNCHRONOUS, CHUNKS
from tests.planning.problems import chains
from tests.planning.ways import check_against_every_way, enlarged, least_shortage, unlike

ALONE = [*(name for name, chunks in CHUNKS.items() if chunks is None), *ASYNCHRONOUS]
TOGETHER = [name for name, chunks in CHUNKS.items() if chunks is not None]
RECOMPUTE = st.sampled_from(["auto", "auto", "never", "except-last", "always"])

SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.filter_too_much]

quick = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=SLOW_TO_DRAW)
many = settings(max_examples=300, deadline=None, suppress_health_check=SLOW_TO_DRAW)

alone = {
    "layers": chains(most=5),
    "cluster": unlike(),
    "name": st.sampled_from(ALONE),
    "micro_batches": st.integers(1, 8),
    "recompute": RECOMPUTE,
    "spare": st.integers(-2, 2),
}
together = {**alone, "layers": chains(most=6), "cluster": unlike(most=3), "name": st.sampled_from(TOGETHER)}


def check_at_the_edge(layers, cluster, name, micro_batches, recompute, spare, chunks=1) -> None:
    """Check the plan where each device has ``spare`` bytes more than the smallest memory that allows one."""
    devices = min(len(layers) // chunks, len(cluster))
    assume(devices >= chunks)
    try:
        built = schedules.build(name, devices=devices, micro_batches=micro_batches, chunks=chunks)
    except schedules.ScheduleError:
        assume(False)
        return
    least = least_shortage(layers, cluster, built, recompute)
    assume(abs(least) < 10**6)
    more = int(least) + spare
    assume(all(d.memory_bytes is None or d.memory_bytes + more > 0 for d in cluster.devices))
    check_against_every_way(layers, enlarged(cluster, more), built, recompute, chunks)


@given(**alone)
@quick
def test_a_byte_decides_under_every_schedule(layers, cluster, name, micro_batches, recompute, spare):
    check_at_the_edge(layers, cluster, name, micro_batches, recompute, spare)


@given(**together)
@quick
def test_a_byte_decides_with_several_stages_a_device(layers, cluster, name, micro_batches, recompute, spare):
    check_at_the_edge(layers, cluster, name, micro_batches, recompute, spare, chunks=2)


@pytest.mark.slow
@given(**alone)
@many
def test_a_byte_decides_in_hundreds_of_chains(layers, cluster, name, micro_batches, recompute, spare):
    check_at_the_edge(layers, cluster, name, micro_batches, recompute, spare)


@pytest.mark.slow
@given(**together)
@many
def test_a_byte_decides_in_hundreds_of_chains_with_several_stages_a_device(
    layers, cluster, name, micro_batches, recompute, spare
):
    check_at_the_edge(layers, cluster, name, micro_batches, recompute, spare, chunks=2)
