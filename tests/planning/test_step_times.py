"""The steps of many cuts that are simulated at once are those of their plans, each simulated by itself."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
from pipepart import Cluster
from pipepart.planning import Plan
from pipepart.planning.plans.options import PlanOptions
from pipepart.planning.request import CHUNKS, read_request
from pipepart.planning.search.named import candidates_of
from pipepart.planning.search.parts import parts_of
from tests.planning.problems import Layer, chains, profile_of
from tests.planning.ways import unlike


@given(
    layers=chains(most=6),
    cluster=unlike(most=3),
    schedule=st.sampled_from([*CHUNKS, "pipedream"]),
    recompute=st.sampled_from(["auto", "always", "except-last"]),
    micro_batches=st.integers(1, 5),
    split=st.sampled_from([None, 0.0, 0.25, -0.25]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_each_step_is_that_of_the_plan(layers, cluster, schedule, recompute, micro_batches, split):
    profile = profile_of([Layer(**{**vars(layer), "split": split}) for layer in layers], [micro_batches])
    (part,) = parts_of(read_request(profile, cluster, PlanOptions(schedule=schedule, recompute=recompute)))
    for (candidate,) in candidates_of(part):
        if candidate.impossible_reason:
            continue
        inner = list(itertools.combinations(candidate.costs.allowed_borders.tolist(), candidate.stages - 1))
        borders = np.array(inner, dtype=np.int64).reshape(len(inner), candidate.stages - 1)[:20]
        orders = list(itertools.permutations(range(len(cluster)), candidate.devices))
        orders = [orders[number % len(orders)] for number in range(len(borders))]
        deficits, steps = candidate.evaluate(borders, np.array(orders).reshape(len(borders), -1))
        for cut, order, deficit, step in zip(borders.tolist(), orders, deficits, steps, strict=True):
            plan = candidate.plan_of(cut, order, 0.0)
            if plan.fits:
                assert deficit <= 0
                assert step == pytest.approx(plan.predicted.step_seconds, rel=1e-12)


def test_a_long_chain_needs_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """All neighbours of a cut are simulated at once; plans are made of the first cut and of the best one."""
    layers = [Layer(forward=1 + index % 7 / 8, backward_weight=1 + index % 3) for index in range(200)]
    made: list[Plan] = []
    predict = Plan.predict

    def counted(plan: Plan, *arguments: object) -> Plan:
        made.append(plan)
        return predict(plan, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Plan, "predict", counted)
    plan = pipepart.plan(profile_of(layers, [16]), Cluster.virtual(8), schedule="interleaved-1f1b")
    assert len(made) <= 9
    assert plan.predicted.step_seconds < 1.1 * plan.predicted.serial_seconds / 8 * (16 + 7 / 2) / 16
