"""How a plan is chosen among schedules, cuts and orders of devices, and where layers share parameters."""

from random import Random

import pytest

import pipepart
from pipepart import Cluster, InfeasiblePlanError, Link, Plan
from pipepart.graph_partition.device_orders import distinct_orders
from pipepart.planning import StagePlan
from pipepart.planning.request import ASYNCHRONOUS, CHUNKS
from tests.planning.problems import Layer, profile_of

EQUAL = [Layer(forward=1, backward_input=1, backward_weight=1)] * 8


def test_a_slow_device_is_left_out_and_named():
    cluster = Cluster.parse(["1GiB", "1GiB@0.05", "1GiB"])
    plan = pipepart.plan(profile_of(EQUAL, [4]), cluster, schedule="1f1b")
    assert [stage.device for stage in plan.stages] == ["device:0", "device:2"]
    assert plan.unused_devices == ("device:1",)
    assert str(plan).splitlines()[-1] == "  without device:1: the step would not be shorter"
    assert len(pipepart.plan(profile_of(EQUAL, [4]), cluster, schedule="1f1b", stages=3).stages) == 3


def test_a_plan_by_hand_has_no_prediction():
    stage = StagePlan(layers=("a",), device="virtual:0")
    plan = Plan(stages=(stage,), cluster=Cluster.virtual(1), schedule="1f1b", micro_batches=1)
    with pytest.raises(ValueError, match="no prediction"):
        _ = plan.predicted


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_named_schedule_is_no_slower_than_any_cut_of_it(name):
    """Few micro-batches and unequal layers: the smallest bottleneck has not the shortest step."""
    layers = [
        Layer(forward=cost, backward_input=2 * cost, parameters=1, output=cost) for cost in (1, 5, 2, 4, 1)
    ]
    profile = profile_of(layers, [2])
    cluster = Cluster(devices=Cluster.virtual(2).devices, link=Link(bandwidth=1.0))
    plan = pipepart.plan(profile, cluster, schedule=name)
    cuts = [pipepart.plan(profile, cluster, schedule=name, cut_before=[f"layer{i}"]) for i in range(1, 5)]
    assert plan.predicted.step_seconds == min(cut.predicted.step_seconds for cut in cuts)


def test_what_changes_the_numbers_or_takes_two_copies_is_planned_only_if_named():
    assert not {*CHUNKS} & {*ASYNCHRONOUS, "chimera"}


@pytest.mark.timeout(30)
def test_few_layers_on_many_devices_have_a_plan():
    profile = profile_of([Layer(output=10)] * 14, [8])
    plan = pipepart.plan(profile, Cluster.virtual(16), seconds=0.3)
    assert plan.predicted.step_seconds < plan.predicted.serial_seconds


def test_devices_with_other_runtimes_are_not_alike():
    cluster = Cluster.virtual(2)
    slow = cluster.devices[1].model_copy(update={"action_seconds": 0.5})
    cluster = cluster.model_copy(update={"devices": (cluster.devices[0], slow)})
    assert list(distinct_orders(cluster, 2)) == [(0, 1), (1, 0)]


def test_layers_that_share_a_parameter_stay_together_unless_they_may_be_parted():
    tied, cluster = profile_of([Layer(), Layer(), Layer(shares_with=(0,))]), Cluster.virtual(2)
    assert len(pipepart.plan(tied, cluster, schedule="1f1b").stages) == 1
    assert len(pipepart.plan(tied, cluster, schedule="1f1b", allow_split_ties=True).stages) == 2
    with pytest.raises(InfeasiblePlanError, match="no cut into 2 stages is possible"):
        pipepart.plan(tied, cluster, stages=2)


def test_they_stay_together_where_a_cut_into_as_many_stages_keeps_them():
    layers = [Layer(), Layer(), Layer(forward=9), Layer(shares_with=(1,)), Layer()]
    for allow_split_ties in (False, True):
        plan = pipepart.plan(
            profile_of(layers), Cluster.virtual(3), schedule="1f1b", allow_split_ties=allow_split_ties
        )
        assert [len(stage.layers) for stage in plan.stages] == [1, 3, 1]


@pytest.mark.parametrize("seed", range(2))
def test_the_joint_search_splits_no_tie_that_as_many_stages_keep_together(seed):
    pick = Random(seed)
    layers = [Layer(forward=pick.uniform(0.5, 2), output=5) for _ in range(8)]
    layers[4] = Layer(forward=1, output=5, shares_with=(2,))
    plan = pipepart.plan(profile_of(layers, [8]), Cluster.virtual(2), allow_split_ties=True)
    (together,) = [stage for stage in plan.stages if "layer4" in stage.layers]
    assert len(plan.stages) > 6 or "layer2" in together.layers
