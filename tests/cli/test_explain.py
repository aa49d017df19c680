"""``pipepart explain``: a saved plan, edited or not, against another one, or against a measured step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from pipepart import Cluster, Plan, Profile, Trace, plan
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


def test_two_plans_and_a_measured_step_are_held_against_a_plan(run: Run, planned: Plan) -> None:
    planned.save("other.json")
    assert run("explain plan.json other.json").stdout.startswith("The plans are equal")
    edit(move_layer_2_to_the_last_stage)
    assert "1 layer in another stage or on another device" in run("explain plan.json other.json").stdout
    planned.save("plan.json")
    Trace(planned, [planned.simulate()]).save("trace.json")
    shown = run("explain plan.json --trace trace.json").stdout
    assert "the median is as predicted (ratio 1.00)" in shown
    assert "Measured timeline of the median step" in shown
