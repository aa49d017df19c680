"""The steps of many cuts that are simulated at once are those of their plans, each simulated by itself."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipepart.planning.plans.options import PlanOptions
from pipepart.planning.request import CHUNKS, read_request
from pipepart.planning.search.candidate import candidates_of
from pipepart.planning.search.parts import parts_of
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
