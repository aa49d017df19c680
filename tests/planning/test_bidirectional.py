"""Plans for chimera: two copies of the model on the same devices, one in each direction."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipepart import Cluster, InfeasiblePlanError, Plan, Profile, plan
from tests.planning.problems import Layer, chains, clusters, profile_of, stages_on
from tests.support.chains import Recompute

MICRO_BATCHES = 4
pytestmark = pytest.mark.usefixtures("no_suggestions")


def every(profile: Profile, cluster: Cluster, mode: Recompute) -> Iterator[Plan]:
    """All plans that fit: any cut on devices in any order."""
    names = [layer.name for layer in profile.layers]
    for devices in range(2, min(len(cluster), len(names)) + 1, 2):
        cuts = itertools.combinations(range(1, len(names)), devices - 1)
        orders = itertools.permutations([device.name for device in cluster.devices], devices)
        for inner, homes in itertools.product(cuts, list(orders)):
            stages = stages_on(names, [0, *inner, len(names)], homes, mode)
            draft: dict[str, Any] = {"stages": stages, "cluster": cluster, "profile": profile}
            one = Plan.model_construct(schedule="chimera", micro_batches=MICRO_BATCHES, **draft).predict()
            if one.fits:
                yield one


@given(
    layers=chains(most=5),
    cluster=clusters(most=4),
    mode=st.sampled_from(["never", "always"]),
    summed=st.booleans(),
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_plan_is_the_best_of_all(layers, cluster, mode, summed):
    """Without parameters the sums of gradients, which the search does not know, take no time."""
    own = layers if summed else [Layer(**{**vars(layer), "parameters": 0}) for layer in layers]
    profile = profile_of(own, [MICRO_BATCHES], optimizer="adam")
    best = min((one.predicted.step_seconds for one in every(profile, cluster, mode)), default=None)
    if best is None:
        with pytest.raises(InfeasiblePlanError):
            plan(profile, cluster, schedule="chimera", recompute=mode)
        return
    found = plan(profile, cluster, schedule="chimera", recompute=mode)
    assert found.fits
    if not summed:
        assert found.predicted.step_seconds == pytest.approx(best, rel=1e-9)


def test_stages_recompute_where_the_stashes_of_both_copies_do_not_fit():
    """One copy has optimizer state."""
    layers = [Layer(parameters=4, saved=30, output=4) for _ in range(8)]
    profile = profile_of(layers, [MICRO_BATCHES], optimizer="adam")
    free = plan(profile, Cluster.virtual(4), schedule="chimera")
    need = max(free.predicted.memory_bytes)
    enough = plan(profile, Cluster.virtual(4, memory=need), schedule="chimera")
    assert [stage.recompute for stage in enough.stages] == ["never"] * 4
    assert enough.predicted.step_seconds == free.predicted.step_seconds
    short = plan(profile, Cluster.virtual(4, memory=need * 3 // 4), schedule="chimera")
    assert short.fits
    assert any(stage.recompute != "never" for stage in short.stages)
    assert short.predicted.step_seconds > free.predicted.step_seconds
