"""``pipepart bench`` and ``pipepart replan``: a measured step, and the plan that follows from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Plan
from pipepart.reporting import BenchResult

Run = Callable[[str], Result]


@pytest.fixture
def planned(run: Run, saved: str) -> str:
    assert run(f"plan {saved} --devices 2 --schedule 1f1b --micro-batches 4 -o plan.json").exit_code == 0
    return "plan.json"


def test_bench_times_both_and_leaves_what_replan_needs(run: Run, planned: str, directory: Path) -> None:
    result = run(f"bench models.py:whole --plan {planned} --steps 2 --trace trace.json --json -o bench.json")
    assert result.exit_code == 0, result.output
    found = BenchResult.model_validate_json(result.stdout, strict=True)
    assert found == BenchResult.load(directory / "bench.json")
    assert (found.model, found.samples, found.steps) == ("Sequential", 12, 2)
    replanned = run(f"replan {planned} --trace trace.json --json -o next.json")
    assert replanned.exit_code == 0, replanned.output
    made = Plan.model_validate_json(replanned.stdout)
    assert made.schedule == "1f1b"
    assert made == Plan.load(directory / "next.json")
    before = Plan.load(planned).profile
    assert made.profile is not None
    assert before is not None
    assert made.profile.costs[0].layers != before.costs[0].layers


def test_bench_profiles_and_plans_without_a_plan(run: Run) -> None:
    result = run("bench models.py:recorded --devices 2 --schedule gpipe --micro-batches 3 --steps 1")
    assert result.exit_code == 0, result.output
    assert re.search(
        r"pipeline on \d devices?, gpipe", result.stdout
    )  # of so small a model one may be the fastest
    assert "plain on virtual:0, 3 micro-batches" in result.stdout
    assert "What limits the step" in result.stdout
