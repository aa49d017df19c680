"""``pipepart explain``: a saved plan, edited or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from pipepart import Cluster, Plan, Profile, Trace, plan
from pipepart.units import format_seconds

Run = Callable[[str], Result]


@pytest.fixture(scope="module")
def three_stages(measured: Profile) -> Plan:
    """A plan of three stages, with alternatives."""
    return plan(measured, Cluster.virtual(3), cut_before=["1", "3"])


@pytest.fixture
def planned(three_stages: Plan, directory: Path) -> Plan:
    """The plan of three stages in ``plan.json``."""
    three_stages.save(directory / "plan.json")
    return three_stages


def edit(directory: Path, change: Callable[[Any], None]) -> None:
    read = json.loads((directory / "plan.json").read_text())
    change(read)
    (directory / "plan.json").write_text(json.dumps(read))


def move_layer_2_to_the_last_stage(document: Any) -> None:
    middle, last = document["stages"][1:]
    middle["layers"].remove("2")
    last["layers"].insert(0, "2")


def test_a_plan_is_shown_whole(run: Run, planned: Plan) -> None:
    result = run("explain plan.json")
    assert result.exit_code == 0, result.stderr
    for title in ("Plan", "Stages: time", "Devices: ", "Alternatives", "Predicted timeline"):
        assert title in result.stdout


def test_an_edited_plan_has_new_figures(run: Run, planned: Plan, directory: Path) -> None:
    old = run("explain plan.json").stdout
    edit(directory, move_layer_2_to_the_last_stage)
    step = format_seconds(Plan.load(directory / "plan.json").predicted.step_seconds)
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
    run: Run, planned: Plan, directory: Path, change: Callable[[Any], None], says: str
) -> None:
    edit(directory, change)
    result = run("explain plan.json")
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_layer_in_another_stage_is_named(run: Run, measured: Profile, directory: Path) -> None:
    for name, first in (("two", "2"), ("four", "4")):
        made = plan(measured, Cluster.virtual(2), schedule="1f1b", micro_batches=4, cut_before=[first])
        made.save(directory / f"{name}.json")
    assert run("explain two.json two.json").stdout.startswith("The plans are equal")
    shown = run("explain two.json four.json").stdout
    assert "2 layers in another stage or on another device" in shown
    assert "2, 3    stage 1" in shown
    assert "stage 1 on virtual:1  stage 0 on virtual:0" in shown


def test_a_measured_step_is_held_against_the_plan(run: Run, planned: Plan, directory: Path) -> None:
    Trace(planned, [planned.simulate()]).save(directory / "trace.json")
    result = run("explain plan.json --trace trace.json")
    assert result.exit_code == 0, result.stderr
    assert "the median is as predicted (ratio 1.00)" in result.stdout
    assert "Measured timeline of the median step" in result.stdout
