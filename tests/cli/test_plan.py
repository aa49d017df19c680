"""``pipepart plan``: what it prints, saves and refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from pipepart import Cluster, Plan, Profile, plan
from pipepart.units import format_bytes, format_seconds

Run = Callable[..., Result]


@pytest.fixture
def planned(run: Run, saved: str) -> Callable[[str], Plan]:
    """Plans the saved profile with options."""
    return lambda options: Plan.model_validate_json(run(f"plan {saved} {options} --json").stdout)


Planned = Callable[[str], Plan]


def test_the_plan_is_that_of_the_library_and_is_printed_whole(run: Run, planned: Planned) -> None:
    made = planned("--devices 2 --schedule gpipe --micro-batches 4 -o plan.json")
    expected = plan(Profile.load("saved.json"), Cluster.virtual(2), schedule="gpipe", micro_batches=4)
    assert made == expected == Plan.load("plan.json")
    shown = run("plan saved.json --devices 2").stdout
    for title in ("Plan", "Stages: time", "Devices: memory", "Alternatives", "Predicted timeline"):
        assert title in shown


def test_described_devices_are_planned_for(planned: Planned) -> None:
    cluster = planned("--device 1GiB --device 2GiB@0.5 --bandwidth 1GB/s --schedule 1f1b").cluster
    assert cluster == Cluster.parse(["1GiB", "2GiB@0.5"], link="1GB/s")
    cluster.save("cluster.json")
    cluster = planned("--cluster cluster.json --memory 1GiB --schedule 1f1b").cluster
    assert [device.memory_bytes for device in cluster.devices] == [2**30] * 2


def test_devices_micro_batches_stages_and_reductions_are_those_asked_for(planned: Planned) -> None:
    made = planned("--devices cpu,cpu,cpu --stages 2 --micro-batches 2 --schedule 1f1b")
    assert [one.name for one in made.cluster.devices] == [one.name for one in Cluster.of(["cpu"] * 3).devices]
    assert (len(made.stages), made.micro_batches) == (2, 2)
    made = planned("--devices 2 --reduction batch")
    assert (made.schedule, made.constraints.reduction) == ("gpipe", "batch")


def test_cuts_are_given_and_layers_kept_together(planned: Planned) -> None:
    options = "--devices 2 --schedule 1f1b --stages 2"
    by_hand = planned(f"{options} --cut-before 1")
    assert [stage.layers for stage in by_hand.stages] == [("0",), ("1", "2", "3", "4")]
    assert planned(f"{options} --colocate 1,2 --colocate 2,3,4").stages == by_hand.stages


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
def test_each_line_of_options_for_a_model_that_does_not_fit_gives_the_plan_that_it_promises(
    run: Run, planned: Planned, request_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # the lines stay whole
    monkeypatch.setattr("pipepart.planning.planner.EXPLAINING_SHARE", 60.0)  # no search is cut off
    told = run(f"plan saved.json {request_of}", 1).stderr
    assert told.startswith("The model does not fit: with ")
    heading = (
        "Use larger devices:" if "1KiB" in request_of else "Options to add that fit, the shortest step first"
    )
    assert heading in told
    lines = re.findall(r"^  \d+\. (.+): (.+) a step.*, at most (.+) on a device$", told, re.MULTILINE)
    assert lines
    for options, step, memory in lines:
        predicted = planned(f"{request_of} {options}").predicted
        assert (step, memory) == (
            format_seconds(predicted.step_seconds),
            format_bytes(max(predicted.memory_bytes)),
        )


def test_messages_are_compressed(run: Run, planned: Planned) -> None:
    options = "--device 1GiB --device 1GiB --bandwidth 1GB/s --stages 2 --compress int8 --schedule 1f1b"
    shown = run(f"plan saved.json {options}").stdout
    assert "activations and gradients as int8: not the numbers of plain training" in shown
    assert "--compress int8" in shown
    named = planned("--devices 2 --stages 2 --compress link=bf16 --schedule 1f1b")
    assert named.cluster.compressed == {"link": "bf16"}


def test_auto_measures_sizes_that_the_mini_batch_has(run: Run, directory: Path) -> None:
    """Of twelve samples: parts have two each at least."""
    made = run("plan models.py:whole --devices 2 --schedule 1f1b --time-budget 0 --json").stdout
    assert Plan.model_validate_json(made).micro_batches in {2, 4, 6}
