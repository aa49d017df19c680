"""Layers that share a parameter: kept together where that can be, parted where it cannot and the user lets them."""

from random import Random

import pytest

import pipepart
from pipepart import Cluster, InfeasiblePlanError
from tests.planning.problems import Layer, profile_of


def test_they_stay_together_unless_that_is_allowed():
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
