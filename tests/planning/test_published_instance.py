"""The joint search on instances with published results."""

import pytest

import pipepart
from benchmarks.layer_tables import PUBLISHED_STEP, published, table_profile
from pipepart import Cluster
from tests.planning.joint_requests import found_for


def test_1f1b_on_an_even_cut_takes_what_was_published():
    plan = pipepart.plan(
        published(),
        Cluster.parse(["80GiB"] * 4),
        schedule="1f1b",
        cut_before=["layer15", "layer29", "layer43"],
    )
    assert plan.predicted.step_seconds == pytest.approx(133_121)


def test_the_joint_search_beats_the_published_plan():
    plan = found_for(published(), Cluster.parse(["80GiB"] * 4), operations=1_000_000)
    assert plan is not None
    assert plan.predicted.step_seconds <= 89_500 < PUBLISHED_STEP


def test_a_small_joint_optimum_is_found():
    """SlackPipe's case: 4 micro-batches, 8 unit layers, forward and backward alike, 2 devices."""
    profile = table_profile([(1, 1, 0)] * 8, micro_batches=4)
    plan = found_for(profile, Cluster.parse(["80GiB"] * 2))
    assert plan is not None
    assert plan.predicted.step_seconds == pytest.approx(34)
    by_hand = found_for(
        profile,
        Cluster.parse(["80GiB"] * 2),
        schedule="search",
        chunks=2,
        cut_before=["layer1", "layer3", "layer6"],
    )
    assert by_hand is not None
    assert by_hand.predicted.step_seconds == pytest.approx(34)
