"""``pipepart explain``: a saved plan, edited or not, against another one, or against a measured step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import schedules
from pipepart import Cluster, Plan, Profile, Trace, plan
from pipepart.planning import StagePlan
from pipepart.planning.plans.searched_order import order_text
from pipepart.units import format_seconds

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def three_stages(measured: Profile) -> Plan:
    """A plan of three stages, with alternatives."""
    return plan(measured, Cluster.virtual(3), cut_before=["1", "3"])


@pytest.fixture
def planned(three_stages: Plan, directory: Path) -> Plan:
    """The plan of three stages in ``plan.json``."""
    three_stages.save(directory / "plan.json")
    return three_stages


def edit(change: Callable[[Any], None]) -> None:
    read = json.loads(Path("plan.json").read_text())
    change(read)
    Path("plan.json").write_text(json.dumps(read))


def move_layer_2_to_the_last_stage(document: Any) -> None:
    middle, last = document["stages"][1:]
    middle["layers"].remove("2")
    last["layers"].insert(0, "2")


def test_a_plan_is_shown_whole_and_an_edited_one_has_new_figures(run: Run, planned: Plan) -> None:
    old = run("explain plan.json").stdout
    for title in ("Plan", "Stages: time", "Devices: ", "Alternatives", "Predicted timeline"):
        assert title in old
    edit(move_layer_2_to_the_last_stage)
    step = format_seconds(Plan.load("plan.json").predicted.step_seconds)
    assert f"{step} predicted" in run("explain plan.json").stdout
    assert f"{step} predicted" not in old


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda read: read["stages"][1]["layers"].remove("2"), "layer '2' is in no stage"),
        (lambda read: read["stages"][0].update(device="virtual:9"), "on device 'virtual:9'"),
        (lambda read: read.update(schedule="zigzag"), "no schedule is called 'zigzag'"),
        (lambda read: read.update(colour="blue"), "colour: Extra inputs"),
        (
            lambda read: read["cluster"]["devices"][0].update(memory_bytes=100),
            "a plan that does not fit its devices",
        ),
    ],
)
def test_what_is_wrong_with_an_edited_plan_is_told(
    run: Run, planned: Plan, change: Callable[[Any], None], says: str
) -> None:
    edit(change)
    told = run("explain plan.json", 2).stderr
    assert says in told
    assert "Traceback" not in told


def test_a_layer_in_another_stage_is_named(run: Run, measured: Profile) -> None:
    for name, first in (("two", "2"), ("four", "4")):
        made = plan(measured, Cluster.virtual(2), schedule="1f1b", micro_batches=4, cut_before=[first])
        made.save(f"{name}.json")
    assert run("explain two.json two.json").stdout.startswith("The plans are equal")
    shown = run("explain two.json four.json").stdout
    assert "2 layers in another stage or on another device" in shown
    assert "2, 3    stage 1" in shown
    assert "stage 1 on virtual:1  stage 0 on virtual:0" in shown


def test_a_measured_step_is_held_against_the_plan(run: Run, planned: Plan) -> None:
    Trace(planned, [planned.simulate()]).save("trace.json")
    shown = run("explain plan.json --trace trace.json").stdout
    assert "the median is as predicted (ratio 1.00)" in shown
    assert "Measured timeline of the median step" in shown


@pytest.fixture
def uneven(measured: Profile, directory: Path) -> Plan:
    """A stage for each of the five layers, three of them on the first of two used devices; one is left out."""
    placement, ones = (0, 1, 0, 1, 0), [1.0] * 5
    order = schedules.search(schedules.StageCosts(ones, ones, ones), 2, 4, placement=placement, effort=0.01)
    names = ("virtual:2", "virtual:0")
    made = Plan(
        stages=tuple(
            StagePlan(layers=(info.name,), device=names[row])
            for info, row in zip(measured.layers, placement, strict=True)
        ),
        cluster=Cluster.virtual(3),
        schedule="search",
        micro_batches=4,
        actions=order_text(order),
        profile=measured.model_copy(update={"costs": (measured.at(4),)}),
    ).refreshed()
    made.save(directory / "uneven.json")
    return made


def test_stages_of_a_searched_order_under_other_orders(run: Run, uneven: Plan) -> None:
    (own,) = json.loads(run("simulate uneven.json --json").stdout)["schedules"]
    assert own["makespan_seconds"] == pytest.approx(uneven.predicted.step_seconds, rel=1e-12)
    (fewer,) = json.loads(run("simulate uneven.json --micro-batches 2 --json").stdout)["schedules"]
    assert [len(row) for row in fewer["actions"]] < [len(row) for row in own["actions"]]
    assert "plan again" in " ".join(run("simulate uneven.json --micro-batches 8", 2).stderr.split())


def test_a_run_of_another_order_of_the_same_stages_is_refused(run: Run, uneven: Plan) -> None:
    order = [list(row) for row in uneven.actions]
    order[0].insert(0, order[0].pop(order[0].index("0F3")))
    other = uneven.model_copy(update={"actions": tuple(map(tuple, order))})
    Trace(other, [other.simulate()]).save("trace.json")
    told = " ".join(run("explain uneven.json --trace trace.json", 2).stderr.split())
    assert "trace.json is no step of uneven.json: action 0 of device 0 is 0F3" in told
