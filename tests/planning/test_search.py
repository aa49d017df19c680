"""Plans whose order of actions was searched for: quicker than every schedule with a name, and saved with the plan."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipepart
import schedules
from pipepart import Cluster, Plan
from tests.planning.problems import Layer, chains, clusters, profile_of

LAYERS = [Layer(1 + i % 3, 1 + i % 2, backward_weight=1, parameters=3, output=5, saved=10) for i in range(8)]


@pytest.fixture(scope="module")
def searched() -> Plan:
    return pipepart.plan(profile_of(LAYERS, [6]), Cluster.parse(["1GiB"] * 3, link=100.0), schedule="search")


def test_it_is_as_quick_as_any_schedule(searched):
    profile, cluster = profile_of(LAYERS, [6]), searched.cluster
    for name in ("auto", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"):
        named = pipepart.plan(profile, cluster, schedule=name)
        assert searched.predicted.step_seconds <= named.predicted.step_seconds


def test_it_is_played_as_it_is_written(searched):
    order = searched.build_schedule()
    schedules.check(order)
    assert tuple(tuple(map(str, row)) for row in order.actions) == searched.actions
    assert schedules.simulate(order, searched.stage_costs()).makespan == searched.predicted.step_seconds
    bound = schedules.bound(searched.stage_costs(), len(searched.workers), 6, placement=order.device_of)
    assert searched.predicted.step_seconds >= bound * (1 - 1e-9)


def test_fewer_micro_batches_have_the_same_order_without_the_others(searched):
    fewer = searched.build_schedule(2)
    assert fewer.micro_batches == 2
    schedules.check(fewer)
    with pytest.raises(schedules.ScheduleError, match="searched for 6 micro-batches, there is none for 7"):
        searched.build_schedule(7)


@pytest.mark.parametrize("step", [0.0, 1000.0], ids=["clock stands still", "each look takes 1,000 s"])
def test_a_plan_says_whether_its_time_was_up(monkeypatch, step):
    moments = itertools.count(0.0, step)
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    plan = pipepart.plan(profile_of(LAYERS, [6]), Cluster.parse(["1GiB"] * 3, link=100.0))
    assert plan.out_of_time == (step > 0)


def test_it_comes_back_from_a_file(searched, tmp_path):
    searched.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == searched


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda plan: plan.update(actions=[]), "known by its actions, and there are none"),
        (lambda plan: plan["actions"][0].pop(), "does not exist for this plan"),
        (lambda plan: plan["actions"][0].reverse(), "does not exist for this plan"),
        (lambda plan: plan["actions"][0].insert(0, "0Q0"), "0Q0"),
        (lambda plan: plan.update(schedule="1f1b"), "schedule '1f1b' determines its own actions"),
        (lambda plan: plan["actions"].pop(), "does not exist for this plan"),
    ],
    ids=["none", "one is missing", "wrong way round", "unknown letter", "named schedule", "a device less"],
)
def test_an_order_that_was_edited_wrongly_is_refused(searched, tmp_path, edit, told):
    searched.save(tmp_path / "plan.json")
    text = json.loads((tmp_path / "plan.json").read_text())
    edit(text)
    (tmp_path / "plan.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=told):
        Plan.load(tmp_path / "plan.json")


PROBLEMS = {
    "layers": chains(most=5),
    "cluster": clusters().filter(lambda cluster: len(cluster) <= 2),
    "count": st.integers(1, 3),
}


@given(**PROBLEMS)
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
def test_it_is_never_slower_than_auto_and_fits(layers, cluster, count):
    check_against_auto(layers, cluster, count)


@pytest.mark.slow
@given(**PROBLEMS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_it_is_never_slower_than_auto_for_many_chains(layers, cluster, count):
    check_against_auto(layers, cluster, count)


def check_against_auto(layers, cluster, count) -> None:
    profile = profile_of(layers, [count])
    try:
        auto = pipepart.plan(profile, cluster)
    except pipepart.InfeasiblePlanError:
        return
    found = pipepart.plan(profile, cluster, schedule="search")
    assert found.schedule == "search"
    assert found.predicted.step_seconds <= auto.predicted.step_seconds * (1 + 1e-9)
    for device, size in zip(cluster.devices, found.predicted.memory_bytes, strict=True):
        assert device.memory_bytes is None or size <= device.memory_bytes
