"""Predicted steps: of many cuts at once as of each alone, never below the bound, with all that a profile measured."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
from pipepart import Cluster, Link, Plan, Profile
from pipepart.planning import StagePlan
from pipepart.planning.costs.step_bound import step_bound
from pipepart.planning.overhead import with_overhead
from pipepart.planning.plans.options import PlanOptions
from pipepart.planning.request import CHUNKS, read_request
from pipepart.planning.search.candidate import candidates_of
from pipepart.planning.search.parts import parts_of
from pipepart.profiling import Overhead
from tests.planning.problems import Layer, chains, clusters, profile_of, with_unequal_sizes

CASES = {
    "layers": chains(most=6),
    "cluster": clusters(most=3),
    "schedule": st.sampled_from([*CHUNKS, "pipedream"]),
    "recompute": st.sampled_from(["auto", "always", "except-last"]),
    "micro_batches": st.integers(1, 5),
    "unequal": st.booleans(),
}


@pytest.mark.parametrize("split", [0.25, -0.25])
@given(**CASES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_each_step_is_that_of_the_plan(split, **drawn):
    check(split=split, **drawn)


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, 0.0, 0.25, -0.25])
@given(**CASES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_each_of_many_steps_is_that_of_the_plan(split, **drawn):
    check(split=split, **drawn)


def check(layers, cluster, schedule, recompute, micro_batches, split, unequal) -> None:
    profile = profile_of([Layer(**{**vars(layer), "split": split}) for layer in layers], [micro_batches])
    profile = with_unequal_sizes(profile) if unequal else profile
    devices = tuple(device.model_copy(update={"action_seconds": 0.125}) for device in cluster.devices)
    cluster = cluster.model_copy(update={"devices": devices})
    (part,) = parts_of(read_request(profile, cluster, PlanOptions(schedule=schedule, recompute=recompute)))
    for candidate in candidates_of(part):
        if candidate.impossible_reason:
            continue
        inner = list(itertools.combinations(candidate.costs.allowed_borders.tolist(), candidate.stages - 1))
        borders = np.array(inner, dtype=np.int64).reshape(len(inner), candidate.stages - 1)[:20]
        orders = list(itertools.permutations(range(len(cluster)), candidate.devices))
        orders = [orders[number % len(orders)] for number in range(len(borders))]
        deficits, steps = candidate.evaluate(borders, np.array(orders).reshape(len(borders), -1))
        for cut, order, deficit, step in zip(borders.tolist(), orders, deficits, steps, strict=True):
            plan = candidate.plan_of(cut, order)
            if plan.fits:
                assert deficit <= 0
                assert step == pytest.approx(plan.predicted.step_seconds, rel=1e-12)


def test_unequal_micro_batches_wait_for_the_smallest():
    """Two layers of 1 s forward and 3 s backward, and two micro-batches of 4/3 and 2/3 of the mean size."""
    profile = with_unequal_sizes(profile_of([Layer(2, 6, 0)] * 2, [2]))
    assert step_bound(profile.costs[0], [1, 1]) == pytest.approx(2 * 4 + 2 / 3 + 2)
    plan = pipepart.plan(profile, Cluster.parse(["1GiB"] * 2), schedule="1f1b", stages=2)
    assert plan.predicted.step_seconds == pytest.approx(38 / 3)


EVEN, UNEVEN = [Layer(4, 4, 4)] * 4, [Layer(1, 2, 4)] * 3
HEAVY = [Layer(8, 8, 8), Layer(80, 80, 80), Layer(0, 0, 0)]


@pytest.mark.parametrize(
    ("layers", "micro_batches", "speeds", "more", "bound"),
    [
        # Layers of 1 s in each part: the second device begins after a layer, the work is 12 s for each micro-batch.
        (EVEN, 4, [1, 1], {}, (4 * 4 * 3 + 1) / 2),
        (EVEN, 4, [0.5, 0.5], {}, 4 * 4 * 3 + 1),
        (EVEN, 4, [1, 0.5], {}, (4 * 4 * 3 + 0.5) / 1.5),
        (EVEN, 4, [1, 1], {"replicas": 2}, 4 * 4 * 3 / 2),
        # A fourth device of these would not begin before the others are done.
        (EVEN, 4, [1, 1, 1, 1e-9], {}, (4 * 4 * 3 + 1 + 2) / 3),
        # The way of one micro-batch.
        (UNEVEN, 1, [1] * 3, {}, 3 * 1 + 3 * 2 + 4),
        # A layer that takes most of the time: the layers before it run once before and once behind.
        (HEAVY, 8, [1] * 3, {}, 1 + 8 * 30),
        ([Layer(8, 8, 8), Layer(80, 80, 0)], 8, [1] * 3, {}, 1 + 8 * 20 + 1 + 1),
        # Two actions of each micro-batch on each device that is used, and in the way of one micro-batch.
        (EVEN, 4, [1], {"action_seconds": 0.5}, 4 * 4 * 3 + 4 * 2 * 0.5),
        (EVEN, 4, [1, 1], {"action_seconds": 0.5}, (4 * 4 * 3 + 1) / 2 + 4 * 2 * 0.5),
        (UNEVEN, 1, [1] * 3, {"action_seconds": 0.5}, 3 * 1 + 3 * 2 + 4 + 2 * 0.5),
    ],
)
def test_no_step_is_shorter_than_its_bound(layers, micro_batches, speeds, more, bound):
    (costs,) = profile_of(layers, [micro_batches]).costs
    assert step_bound(costs, speeds, **more) == pytest.approx(bound, rel=1e-6)
    alone = pipepart.plan(profile_of(layers, [micro_batches]), Cluster.virtual(1), schedule="sequential")
    assert 0 <= alone.step_gap < 1e-9


MEASURED = Overhead(action_seconds=0.5, message_seconds=0.25, devices=2, cores=2)


def measured(
    layers: int = 4, slowdown: float = 1.5, overhead: Overhead = MEASURED, micro_batches: int = 4
) -> Profile:
    """A profile of equal layers: forward 1 s, backward 1 + 1 s for each of 4 micro-batches."""
    profile = profile_of([Layer(4, 4, 4)] * layers, [micro_batches])
    (costs,) = profile.costs
    slower = tuple(cost.model_copy(update={"slowdown": slowdown}) for cost in costs.layers)
    costs = costs.model_copy(update={"layers": slower})
    return profile.model_copy(update={"costs": (costs,), "overhead": overhead})


def test_actions_messages_and_slower_layers_are_those_of_the_simulated_step():
    """GPipe of 2 stages: a stage's F is 2 layers of 1.5 s and an action, its B is twice the layers and an action."""
    plan = pipepart.plan(measured(), Cluster.virtual(2, threads=1), schedule="gpipe", stages=2)
    assert plan.predicted.step_seconds == pytest.approx(5 * (2 * 1.5 + 0.5) + 5 * (4 * 1.5 + 0.5) + 2 * 0.25)


def test_a_step_begins_and_ends_once():
    profile, cluster = measured(), Cluster.virtual(2, threads=1)
    begun = measured(overhead=MEASURED.model_copy(update={"step_seconds": 7.0}))
    plan, longer = (pipepart.plan(each, cluster, schedule="gpipe", stages=2) for each in (profile, begun))
    assert longer.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds + 7.0)
    assert longer.step_bound == pytest.approx(plan.step_bound + 7.0)
    assert longer.refreshed() == longer
    assert longer.simulate().makespan == plan.simulate().makespan


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "gpipe"])
def test_one_device_is_tried_with_the_layers_as_fast_as_alone(schedule):
    """Two devices have half of the work each, and take three times as long for it."""
    plan = pipepart.plan(measured(slowdown=3.0), Cluster.virtual(2, threads=1), schedule=schedule)
    assert plan.predicted.step_seconds == pytest.approx(4 * 4 * 3 + 8 * 0.5)


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_as_many_devices_as_there_are_cores_are_tried_as_fast_as_beside_each_other(schedule):
    """Four threads on two cores take turns; the plan of two of them is that of a cluster of two."""
    profile = measured(8, slowdown=1.0, overhead=MEASURED.model_copy(update={"action_seconds": 0.0}))
    two, four = (
        pipepart.plan(profile, Cluster.virtual(count, threads=1), schedule=schedule) for count in (2, 4)
    )
    assert four.predicted.step_seconds <= two.predicted.step_seconds * 1.001
    assert len(four.unused_devices) == 2


def test_an_edited_plan_has_the_layers_as_slow_as_beside_its_own_devices():
    """All layers moved to one of two devices: nothing computes beside them any more."""
    cluster = Cluster.virtual(2, threads=1)
    two, one = (pipepart.plan(measured(), cluster, schedule="1f1b", stages=stages) for stages in (2, 1))
    names = tuple(name for stage in two.stages for name in stage.layers)
    stage = StagePlan(layers=names, device=one.stages[0].device)
    edited = Plan(**{**dict(two), "stages": (stage,), "prediction": None}).refreshed()
    assert edited.stages == one.stages
    assert edited.predicted.step_seconds == one.predicted.step_seconds < two.predicted.step_seconds * 2


def test_the_bound_holds_for_plans_on_fewer_devices_whose_layers_are_faster():
    """One micro-batch gains nothing from a second device, beside which all layers are slower."""
    profile, cluster = measured(micro_batches=1), Cluster.virtual(2, threads=1)
    two, one = (pipepart.plan(profile, cluster, schedule="1f1b", stages=stages) for stages in (2, 1))
    assert two.step_bound == one.step_bound <= one.predicted.step_seconds < two.predicted.step_seconds


def test_described_devices_have_no_overhead_and_a_described_latency_or_action_is_kept_where_it_is_longer():
    described = Cluster.parse(["1GiB", "1GiB"])
    assert with_overhead(measured(), described) == (measured(), described)
    slow = Cluster.virtual(2, threads=1, latency=3.0)
    _, cluster = with_overhead(measured(), slow)
    assert (cluster.link.latency, cluster.message_seconds) == (3.0, 0.25)
    device = slow.devices[0].model_copy(update={"action_seconds": 2.0})
    unlike = slow.model_copy(update={"devices": (device, slow.devices[1]), "link": Link()})
    _, cluster = with_overhead(measured(), unlike)
    assert [one.action_seconds for one in cluster.devices] == [2.0, 0.5]
    assert cluster.link.latency == 0.25


@pytest.mark.parametrize(
    ("devices", "threads", "cores", "factor"),
    [
        (1, 1, 2, 1.0),  # alone
        (2, 1, 2, 1.5),  # as measured
        (2, 1, None, 1.5),
        (4, 1, None, 1 + 3 * 0.5),  # on a straight line
        (4, 1, 2, 1.5 * 2),  # two at once, and each has half of the time
        (2, 2, 2, 2.0),  # one at once
    ],
)
def test_layers_are_slower_beside_more_devices_and_share_the_cores(devices, threads, cores, factor):
    overhead = Overhead(devices=2, cores=cores)
    assert overhead.slowdown(1.5, devices, threads) == pytest.approx(factor)


def test_the_seconds_of_one_device_are_those_of_the_layers_alone():
    for cluster in (Cluster.virtual(2, threads=1), Cluster.parse(["1GiB"] * 2)):
        plan = pipepart.plan(measured(), cluster, schedule="1f1b", stages=2)
        assert plan.predicted.serial_seconds == pytest.approx(4 * 4 * 3)
