"""The lower bound of a step against the shortest of all: every cut, placement, order and split of backwards."""

import pytest

import pipepart
from pipepart import Cluster
from pipepart.planning.costs.step_bound import step_bound
from tests.planning import problems
from tests.planning.problems import Layer, profile_of


def test_unequal_micro_batches_wait_for_the_smallest():
    """Two layers of 1 s forward and 3 s backward, and two micro-batches of 4/3 and 2/3 of the mean size."""
    profile = problems.with_unequal_sizes(profile_of([Layer(2, 6, 0)] * 2, [2]))
    assert step_bound(profile.costs[0], [1, 1]) == pytest.approx(2 * 4 + 2 / 3 + 2)
    plan = pipepart.plan(profile, Cluster.parse(["1GiB"] * 2), schedule="1f1b", stages=2)
    assert plan.predicted.step_seconds == pytest.approx(38 / 3)


def test_the_work_of_all_devices_and_the_layers_before_a_device_can_begin():
    """Four layers of 1 s in each part and two devices: the second one begins after a layer, the work is 12 s each."""
    (costs,) = profile_of([Layer(4, 4, 4)] * 4, [4]).costs
    assert step_bound(costs, [1, 1]) == (4 * 4 * 3 + 1) / 2
    assert step_bound(costs, [0.5, 0.5]) == 4 * 4 * 3 + 1
    assert step_bound(costs, [1, 0.5]) == (4 * 4 * 3 + 0.5) / 1.5
    assert step_bound(costs, [1, 1], replicas=2) == 4 * 4 * 3 / 2
    # A fourth device of these would not begin before the others are done.
    assert step_bound(costs, [1, 1, 1, 1e-9]) == pytest.approx((4 * 4 * 3 + 1 + 2) / 3, rel=1e-6)


def test_the_way_of_one_micro_batch_and_the_work_of_one_layer():
    (one,) = profile_of([Layer(1, 2, 4)] * 3, [1]).costs
    assert step_bound(one, [1] * 3) == 3 * 1 + 3 * 2 + 4
    # A layer that takes most of the time: the layers before it run once before and once behind.
    (heavy,) = profile_of([Layer(8, 8, 8), Layer(80, 80, 80), Layer(0, 0, 0)], [8]).costs
    assert step_bound(heavy, [1] * 3) == 1 + 8 * 30
    (no_weights,) = profile_of([Layer(8, 8, 8), Layer(80, 80, 0)], [8]).costs
    assert step_bound(no_weights, [1] * 3) == 1 + 8 * 20 + 1 + 1


def test_each_action_takes_time_beside_its_layers():
    """Two actions of each micro-batch on each device that is used, and in the way of one micro-batch."""
    (costs,) = profile_of([Layer(4, 4, 4)] * 4, [4]).costs
    assert step_bound(costs, [1], action_seconds=0.5) == 4 * 4 * 3 + 4 * 2 * 0.5
    assert step_bound(costs, [1, 1], action_seconds=0.5) == (4 * 4 * 3 + 1) / 2 + 4 * 2 * 0.5
    (one,) = profile_of([Layer(1, 2, 4)] * 3, [1]).costs
    assert step_bound(one, [1] * 3, action_seconds=0.5) == 3 * 1 + 3 * 2 + 4 + 2 * 0.5
    plan = pipepart.plan(profile_of([Layer(4, 4, 4)] * 4, [4]), Cluster.virtual(1), schedule="sequential")
    assert plan.step_gap < 1e-9
