"""``pipepart profile``: what it prints, saves and refuses."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Profile

Run = Callable[[str], Result]


def traceback_of(result: Result) -> str:
    """What Python prints for the exception that ended the command."""
    assert result.exception is not None
    return "".join(traceback.format_exception(result.exception))


def test_a_table_of_the_layers_is_printed(run: Run) -> None:
    result = run("profile models.py:whole --time-budget 0 --micro-batches 1,2")
    assert result.exit_code == 0, result.stderr
    assert "Sizes profiled" in result.stdout
    assert "micro-batch of 12 samples" in result.stdout
    assert result.stdout.count("Linear") == 3
    assert "loss" in result.stdout


def test_json_alone_stands_on_standard_output_and_in_the_file(run: Run, directory: Path) -> None:
    options = "--micro-batches 3,2 --optimizer sgd --threads 1 --json -o profile.json"
    result = run(f"profile models:whole --time-budget 0 {options}")  # a module of the current directory
    assert result.exit_code == 0, result.stderr
    found = Profile.model_validate_json(result.stdout)
    assert found == Profile.load(directory / "profile.json")
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
    assert run(f"profile models.py:instance --input 4x8 {SPEED}").exit_code == 0


def test_an_import_that_fails_inside_the_users_file_is_not_taken_for_a_missing_file(
    run: Run, directory: Path
) -> None:
    (directory / "needy.py").write_text("import not_installed_here\n")
    for place in ("needy.py", "needy"):
        result = run(f"profile {place}:f")
        assert result.exit_code == 1
        assert "needy.py" in traceback_of(result)


SPEED = "--roofline cpu:50GFLOP/s,10GB/s,10us"


def test_times_are_estimated_without_running(run: Run) -> None:
    result = run(f"profile models.py:on_meta {SPEED}")
    assert result.exit_code == 0, result.stderr
    assert "estimated forward and backward" in " ".join(result.stdout.split())
    assert "Times are estimates for cpu: 50 GFLOP/s, 10 GB/s, 10 us;" in " ".join(result.stdout.split())
    assert "±" not in result.stdout
    assert "nothing was measured" in result.stderr


def test_plans_from_estimates_are_explained_simulated_and_checked(run: Run) -> None:
    made = run(f"plan models.py:whole {SPEED} --devices 2 --micro-batches 2 -o plan.json")
    assert made.exit_code == 0, made.stderr
    assert "estimated for cpu" in run("explain plan.json").stdout
    assert run("simulate plan.json").exit_code == 0
    assert run("check models.py:whole --plan plan.json").exit_code == 0
