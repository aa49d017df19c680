"""``pipepart plan``: what it prints, saves and refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Cluster, Plan, Profile, plan
from pipepart.units import format_bytes, format_seconds

Run = Callable[[str], Result]


def test_a_saved_profile_is_planned(run: Run, saved: str) -> None:
    result = run(f"plan {saved} --devices 2")
    assert result.exit_code == 0, result.stderr
    for title in ("Plan", "Stages: time", "Devices: memory", "Alternatives", "Predicted timeline"):
        assert title in result.stdout


def test_the_plan_is_that_of_the_library(run: Run, saved: str, directory: Path) -> None:
    result = run(f"plan {saved} --devices 2 --schedule gpipe --micro-batches 4 --json -o plan.json")
    expected = plan(Profile.load(saved), Cluster.virtual(2), schedule="gpipe", micro_batches=4)
    assert Plan.model_validate_json(result.stdout) == expected == Plan.load(directory / "plan.json")


def test_described_devices_are_planned_for(run: Run, saved: str) -> None:
    result = run(f"plan {saved} --device 1GiB --device 2GiB@0.5 --bandwidth 1GB/s --schedule 1f1b --json")
    cluster = Plan.model_validate_json(result.stdout).cluster
    assert cluster == Cluster.parse(["1GiB", "2GiB@0.5"], link="1GB/s")
    cluster.save("cluster.json")
    result = run(f"plan {saved} --cluster cluster.json --memory 1GiB --schedule 1f1b --json")
    assert [d.memory_bytes for d in Plan.model_validate_json(result.stdout).cluster.devices] == [2**30] * 2


def test_devices_micro_batches_and_stages_are_those_asked_for(run: Run, saved: str) -> None:
    made = Plan.model_validate_json(
        run(f"plan {saved} --devices cpu,cpu,cpu --stages 2 --micro-batches 2 --schedule 1f1b --json").stdout
    )
    assert [device.name for device in made.cluster.devices] == [
        device.name for device in Cluster.of(["cpu"] * 3).devices
    ]
    assert (len(made.stages), made.micro_batches) == (2, 2)


def test_a_loss_of_the_whole_batch_is_planned_for(run: Run, saved: str) -> None:
    plan = Plan.model_validate_json(run(f"plan {saved} --devices 2 --reduction batch --json").stdout)
    assert (plan.schedule, plan.constraints.reduction) == ("gpipe", "batch")


def test_cuts_are_given_and_layers_kept_together(run: Run, saved: str) -> None:
    line = f"plan {saved} --devices 2 --schedule 1f1b --stages 2 --json"
    by_hand = Plan.model_validate_json(run(f"{line} --cut-before 1").stdout)
    assert [stage.layers for stage in by_hand.stages] == [("0",), ("1", "2", "3", "4")]
    tied = Plan.model_validate_json(run(f"{line} --colocate 1,2 --colocate 2,3,4").stdout)
    assert tied.stages == by_hand.stages


def test_a_model_that_does_not_fit_is_told_what_would(run: Run, saved: str) -> None:
    line = f"plan {saved} --devices 2 --memory 8300 --schedule gpipe --micro-batches 2 --recompute never"
    result = run(line)
    assert result.exit_code == 1
    assert result.stderr.startswith("The model does not fit: with 2 stages")
    assert "Options to add that fit, the shortest step first" in result.stderr
    assert result.stderr.count(". --more-devices 1: ") == 1


@pytest.mark.parametrize(
    "request_of",
    [
        "--devices 2 --memory 8300 --schedule gpipe --micro-batches 2 --recompute never",
        pytest.param(
            "--device 8000B --device 8000B --schedule looped-bfs --chunks 2 --recompute never --micro-batches 2",
            marks=pytest.mark.slow,
        ),
        pytest.param("--devices 2 --memory 1KiB", marks=pytest.mark.slow),
        "--devices 1 --memory 9200 --micro-batches 2 --recompute never --schedule gpipe",
    ],
)
def test_each_line_of_options_gives_the_plan_that_it_promises(
    run: Run, saved: str, request_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # the lines stay whole
    monkeypatch.setattr("pipepart.planning.planner.EXPLAINING_SHARE", 60.0)  # no search is cut off
    told = run(f"plan {saved} {request_of}").stderr
    lines = re.findall(r"^  \d+\. (.+): (.+) a step.*, at most (.+) on a device$", told, re.MULTILINE)
    assert lines
    for options, step, memory in lines:
        result = run(f"plan {saved} {request_of} {options} --json")
        assert result.exit_code == 0, result.stderr
        predicted = Plan.model_validate_json(result.stdout).predicted
        assert (step, memory) == (
            format_seconds(predicted.step_seconds),
            format_bytes(max(predicted.memory_bytes)),
        )


def test_messages_are_compressed(run: Run, saved: str) -> None:
    result = run(
        f"plan {saved} --device 1GiB --device 1GiB --bandwidth 1GB/s --stages 2 --compress int8 --schedule 1f1b"
    )
    assert "activations and gradients as int8: not the numbers of plain training" in result.stdout
    assert "--compress int8" in result.stdout
    named = run(f"plan {saved} --devices 2 --stages 2 --compress link=bf16 --schedule 1f1b --json")
    assert Plan.model_validate_json(named.stdout).cluster.compressed == {"link": "bf16"}


def test_auto_measures_sizes_that_the_mini_batch_has(run: Run) -> None:
    """Of twelve samples: parts have two each at least."""
    result = run("plan models.py:whole --devices 2 --schedule 1f1b --time-budget 0 --json")
    assert Plan.model_validate_json(result.stdout).micro_batches in {2, 4, 6}
