"""What a profile measured besides the layers counts in every figure of a plan, once."""

import pytest

import pipepart
from pipepart import Cluster, Link, Plan, Profile
from pipepart.planning import StagePlan
from pipepart.planning.overhead import with_overhead
from pipepart.profiling import Overhead
from tests.planning.problems import Layer, profile_of

MEASURED = Overhead(action_seconds=0.5, message_seconds=0.25, devices=2, cores=2)


def measured(layers: int = 4, slowdown: float = 1.5, overhead: Overhead = MEASURED) -> Profile:
    """A profile of equal layers: 4 micro-batches, forward 1 s, backward 1 + 1 s each."""
    profile = profile_of([Layer(4, 4, 4)] * layers, [4])
    costs = profile.costs[0]
    slower = tuple(cost.model_copy(update={"slowdown": slowdown}) for cost in costs.layers)
    return profile.model_copy(
        update={"costs": (costs.model_copy(update={"layers": slower}),), "overhead": overhead}
    )


def test_actions_messages_and_slower_layers_are_those_of_the_simulated_step():
    """GPipe of 2 stages: a stage's F is 2 layers of 1.5 s and an action, its B is twice the layers and an action."""
    plan = pipepart.plan(measured(), Cluster.virtual(2, threads=1), schedule="gpipe", stages=2)
    forward, backward, message = 2 * 1.5 + 0.5, 4 * 1.5 + 0.5, 0.25
    expected = 5 * forward + 5 * backward + 2 * message
    assert plan.predicted.step_seconds == pytest.approx(expected)


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
    profile, cluster = measured(), Cluster.virtual(2, threads=1)
    once = profile_of([Layer(4, 4, 4)] * 4, [1]).costs[0]
    slower = tuple(cost.model_copy(update={"slowdown": 1.5}) for cost in once.layers)
    profile = profile.model_copy(update={"costs": (once.model_copy(update={"layers": slower}),)})
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
