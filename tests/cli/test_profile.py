"""``pipepart profile``: what it prints, saves and refuses."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Profile

Run = Callable[..., Result]
SPEED = "--roofline cpu:50GFLOP/s,10GB/s,10us"


def test_json_alone_stands_on_standard_output_and_in_the_file(run: Run) -> None:
    options = "--micro-batches 3,2 --optimizer sgd --threads 1 --json -o profile.json"
    result = run(f"profile models:whole --time-budget 0 {options}")  # a module of the current directory
    found = Profile.model_validate_json(result.stdout)
    assert found == Profile.load("profile.json")
    assert [costs.micro_batches for costs in found.costs] == [2, 3]
    assert (found.optimizer, found.threads) == ("sgd", 1)
    assert "imported\nmade\n" in result.stderr
    assert "Saved in profile.json" in result.stderr


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("", ["embed", "blocks.0", "blocks.1"]),
        ("--layers embed,blocks.0.0", ["embed", "blocks.0.0", "blocks.0.1", "blocks.1"]),
        ("--layers ''", ["Tagger"]),
    ],
)
def test_modules_that_become_layers_are_named(run: Run, layers: str, names: list[str]) -> None:
    result = run(f"profile models.py:recorded --time-budget 0 --json {layers}")
    assert [layer["name"] for layer in json.loads(result.stdout)["layers"]] == names


def test_a_sample_can_be_made_up_and_a_missing_loss_is_mentioned(run: Run) -> None:
    result = run("profile models.py:tokens --input 6x3:int64:50 --time-budget 0 --json")
    assert json.loads(result.stdout)["inputs"] == [{"shape": [6, 3], "dtype": "int64"}]
    assert "Note: no loss function" in result.stderr
    run(f"profile models.py:instance --input 4x8 {SPEED}")


def test_an_import_that_fails_inside_the_users_file_is_not_taken_for_a_missing_file(run: Run) -> None:
    Path("needy.py").write_text("import not_installed_here\n")
    for place in ("needy.py", "needy"):
        error = run(f"profile {place}:f", 1).exception
        assert error is not None
        assert "needy.py" in "".join(traceback.format_exception(error))


def test_times_are_estimated_without_running_and_plans_of_estimates_are_explained_and_checked(
    run: Run,
) -> None:
    result = run(f"profile models.py:on_meta {SPEED}")
    words = " ".join(result.stdout.split())
    assert "estimated forward and backward" in words
    assert "Times are estimates for cpu: 50 GFLOP/s, 10 GB/s, 10 us;" in words
    assert "±" not in words
    assert "nothing was measured" in result.stderr
    run(f"plan models.py:whole {SPEED} --devices 2 --micro-batches 2 -o plan.json")
    assert "estimated for cpu" in run("explain plan.json").stdout
    run("simulate plan.json")
    run("check models.py:whole --plan plan.json")
