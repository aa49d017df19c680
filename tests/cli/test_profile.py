"""``pipepart profile``: what it prints, saves and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Profile

Run = Callable[[str], Result]


def test_a_table_of_the_layers_is_printed(run: Run) -> None:
    result = run("profile models.py:whole --time-budget 0")
    assert result.exit_code == 0, result.stderr
    assert "micro-batch of 12 samples" in result.stdout
    assert result.stdout.count("Linear") == 3
    assert "loss" in result.stdout


def test_several_sizes_are_compared(run: Run) -> None:
    assert "Sizes profiled" in run("profile models.py:whole --time-budget 0 --micro-batches 2,4").stdout


def test_json_alone_stands_on_standard_output(run: Run) -> None:
    result = run("profile models.py:whole --time-budget 0 --micro-batches 3,2 --json")
    assert result.exit_code == 0
    assert [costs["micro_batches"] for costs in json.loads(result.stdout)["costs"]] == [2, 3]
    assert "imported\nmade\n" in result.stderr


def test_what_is_saved_is_what_is_printed(run: Run, directory: Path) -> None:
    result = run("profile models.py:whole --time-budget 0 --json -o profile.json")
    assert Profile.model_validate_json(result.stdout) == Profile.load(directory / "profile.json")
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


def test_options_reach_the_measurement(run: Run) -> None:
    result = run("profile models.py:whole --time-budget 0 --optimizer sgd --threads 1 --json")
    profile = Profile.model_validate_json(result.stdout)
    assert (profile.optimizer, profile.threads) == ("sgd", 1)


def test_a_module_is_imported_from_the_current_directory(run: Run) -> None:
    assert run("profile models:whole --time-budget 0").exit_code == 0


def test_a_model_that_stands_in_the_file_needs_no_function(run: Run) -> None:
    assert run("profile models.py:instance --input 4x8 --time-budget 0").exit_code == 0


def test_a_sample_can_be_made_up(run: Run) -> None:
    result = run("profile models.py:tokens --input 6x3:int64:50 --time-budget 0 --json")
    assert json.loads(result.stdout)["inputs"] == [{"shape": [6, 3], "dtype": "int64"}]


def test_a_missing_loss_is_mentioned(run: Run) -> None:
    result = run("profile models.py:with_sample --time-budget 0")
    assert "Note: no loss function" in result.stderr
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("models.py", "write path/to/file.py:factory"),
        ("nofile.py:f", "'nofile.py' does not exist"),
        ("models.py:hole", "did you mean whole?"),
        ("models.py:xyz", "it has layers, whole"),
        ("nomodule.sub:f", "no module 'nomodule'"),
        ("models.nosub:f", "no module 'models.nosub'"),
        ("..:f", "not the name of a module"),
        ("/:f", "is a directory"),
        (
            "models.py:sized",
            "missing a required argument: 'width'. It takes (width, depth=2): write models.py:sized(width=...)",
        ),
        ("models.py:nothing", "returned NoneType where a model was expected"),
        ("models.py:five", "returned a tuple of 5"),
        ("models.py:swapped", "returned Tensor, Sequential where a model"),
        ("models.py:swapped_loss", "returned Tensor where a loss function was expected"),
        ("models.py:number", "is of type int"),
        ("models.py:layers", "without a sample"),
        ("models.py:no_forward", "ModuleList has no forward"),
        ("models.py:other_target", "the target has 11 samples where the input has 12"),
        ("models.py:layers --input 4by8", "'4by8' is not a shape"),
        ("models.py:layers --input 0x8", "at least 1"),
        ("models.py:layers --input 999999999x999999", "does not fit in memory"),
        ("models.py:layers --input 4x8:float31", "no dtype 'float31'"),
        ("models.py:layers --input 4x8:float32:9", "a bound is for whole numbers"),
        ("models.py:layers --input 4x8:int8:999", "between 1 and 127"),
        ("models.py:whole --micro-batches 0", "'--micro-batches': '0'"),
        ("models.py:whole --micro-batches 2,x", "'--micro-batches': '2,x'"),
        ("models.py:whole --micro-batches 13", "more than the mini-batch has samples, 12"),
        ("models.py:whole --optimizer lion", "'lion' is not known"),
        ("models.py:whole --threads 0", "--threads"),
        ("models.py:whole -o nowhere/profile.json", "there is no directory"),
        ("models.py:whole -o .", "it is a directory"),
    ],
)
def test_a_mistake_is_told_in_a_line(run: Run, line: str, says: str) -> None:
    result = run(f"profile {line}")
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("factory", "says"),
    [("breaks", "no data on this disk"), ("breaking_layer", "this layer breaks")],
)
def test_an_exception_of_the_users_code_has_its_traceback(run: Run, factory: str, says: str) -> None:
    result = run(f"profile models.py:{factory}")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert f"ValueError: {says}" in result.stderr
    assert "models.py" in result.stderr
    assert "mistakes_told" not in result.stderr


def test_a_file_that_python_cannot_read_has_its_place(run: Run, directory: Path) -> None:
    (directory / "syntax.py").write_text("def f(:\n")
    result = run("profile syntax.py:f")
    assert result.exit_code == 1
    assert "line 1" in result.stderr
    assert "importlib" not in result.stderr


def test_an_import_that_fails_inside_the_users_file_is_not_taken_for_a_missing_file(
    run: Run, directory: Path
) -> None:
    (directory / "needy.py").write_text("import not_installed_here\n")
    for place in ("needy.py", "needy"):
        result = run(f"profile {place}:f")
        assert result.exit_code == 1
        assert "needy.py" in result.stderr


SPEED = "--roofline cpu:50GFLOP/s,10GB/s,10us"


def test_times_are_estimated_without_running(run: Run) -> None:
    result = run(f"profile models.py:on_meta --no-measure {SPEED}")
    assert result.exit_code == 0, result.stderr
    assert "estimated forward and backward" in " ".join(result.stdout.split())
    assert "Times are estimates for cpu: 50 GFLOP/s, 10 GB/s, 10 us;" in " ".join(result.stdout.split())
    assert "±" not in result.stdout
    assert "nothing was measured" in result.stderr


def test_plans_from_estimates_are_explained_simulated_and_checked(run: Run) -> None:
    made = run(f"plan models.py:whole --no-measure {SPEED} --devices 2 --micro-batches 2 -o plan.json")
    assert made.exit_code == 0, made.stderr
    assert "estimated for cpu" in run("explain plan.json").stdout
    assert run("simulate plan.json").exit_code == 0
    assert run("check models.py:whole --plan plan.json").exit_code == 0


def test_a_roofline_needs_no_measure(run: Run) -> None:
    result = run(f"profile models.py:whole {SPEED}")
    assert result.exit_code == 2
    assert "add --no-measure" in result.stderr
    assert run("profile models.py:whole --no-measure --roofline fast").exit_code == 2
