"""Whatever is asked of the planner, it answers with a sound plan or says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

import pipepart
import schedules
from pipepart import Plan
from pipepart.reporting import plan_reports
from tests.planning.hostile import Request, drawn_request
from tests.support.seeds import seeds


def planned(request: Request, **changes: Any) -> Plan | ValueError:
    """The plan, or the error with which it is refused.

    Time stands still meanwhile: what a search finds in a number of operations does not depend on the machine.
    """
    with patch("schedules.searching.clock.time.monotonic", return_value=0.0):
        try:
            return pipepart.plan(request.profile, request.cluster, **{**request.options, **changes})
        except ValueError as error:
            return error


def check(seed: int, folder: Path) -> None:
    request = drawn_request(seed)
    plan = planned(request)
    if isinstance(plan, ValueError):
        assert len(str(plan)) > 20, "says too little"
        assert str(planned(request)) == str(plan)
        return
    assert planned(request) == plan
    assert_sound(plan, request)
    assert_kept(plan, request)
    plan.save(folder / "plan.json")
    assert Plan.load(folder / "plan.json") == plan
    console = Console(width=100)
    with console.capture() as shown:
        for report in plan_reports(plan):
            console.print(report)
    assert f"{plan.micro_batches}" in shown.get()
    assert "stage 0" in str(plan)


def assert_sound(plan: Plan, request: Request) -> None:
    """Assert that the schedule is legal, and that the prediction is its simulation, above the bound, and fits."""
    schedules.check(plan.build_schedule())
    step = plan.simulate()
    assert plan.step_bound <= plan.predicted.step_seconds * (1 + 1e-9)
    assert plan.predicted.step_seconds == step.makespan
    assert plan.predict().predicted.step_seconds == plan.predicted.step_seconds
    assert plan.predicted.bottleneck_bound <= plan.predicted.bottleneck_seconds * (1 + 1e-9)
    assert [name for stage in plan.stages for name in stage.layers] == [
        layer.name for layer in request.profile.layers
    ]
    assert plan.fits
    predicted = dict(zip(request.cluster.devices, plan.predicted.memory_bytes, strict=True))
    assert all(
        device.memory_bytes is None or need <= device.memory_bytes for device, need in predicted.items()
    )
    needs = {device.name: need for device, need in predicted.items() if need}
    assert {name: need for name, need in plan.device_bytes().items() if need} == needs
    of_step = plan.device_bytes(step)
    assert all(need <= needs.get(name, 0) for name, need in of_step.items())
    if (least := max(of_step.values())) > 1:  # with a byte less than its own step needs, a plan does not fit
        assert not plan.model_copy(update={"cluster": plan.cluster.with_memory(least - 1)}).predict().fits


def assert_kept(plan: Plan, request: Request) -> None:
    """Assert that the plan keeps every constraint."""
    asked = request.options
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    firsts = [stage.layers[0] for stage in plan.stages[1:]]
    assert all(len({stage_of[name] for name in group}) == 1 for group in asked.get("colocate", ()))
    assert firsts == list(asked.get("cut_before", firsts))
    assert len(plan.stages) == asked.get("stages", len(plan.stages))
    assert plan.micro_batches == asked.get("micro_batches", plan.micro_batches)
    assert plan.schedule == asked.get("schedule", plan.schedule)
    assert plan.schedule == "search" or plan.chunks == asked.get("chunks", plan.chunks)
    assert asked.get("replicas") == "auto" or plan.replicas == asked.get("replicas", 1)
    if "recompute" in asked:
        assert {stage.recompute for stage in plan.stages if stage.backward_seconds} <= {asked["recompute"]}
    if not asked.get("allow_split_ties"):
        for layer in request.profile.layers:
            assert all(stage_of[owner] == stage_of[layer.name] for owner in layer.shares_with)


@pytest.mark.parametrize("seed", range(10))
def test_a_sound_plan_or_an_error(seed, tmp_path):
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(2))
def test_a_sound_plan_or_an_error_for_many(block, tmp_path):
    for seed in seeds(25, f"hostile plans {block}"):
        check(seed, tmp_path)


@pytest.mark.slow
def test_plans_are_the_same_in_every_process():
    """Whatever the order of sets there."""
    code = (
        "from tests.planning.test_hostile import Plan, drawn_request, planned\n"
        "for made in map(planned, map(drawn_request, range(8))):\n"
        "    print(made.model_dump_json() if isinstance(made, Plan) else made)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=250,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(said) == 1
