"""``pipepart plan``: what it prints, saves and refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
DESCRIBED = Cluster.parse(["1GiB", "2GiB@0.5"], link="1GB/s")

# Options, and the cluster and the keywords that they stand for.
OPTIONS: dict[str, tuple[Cluster, dict[str, Any]]] = {
    "--devices 2 --schedule gpipe --micro-batches 4": (
        Cluster.virtual(2),
        {"schedule": "gpipe", "micro_batches": 4},
    ),
    "--devices cpu,cpu,cpu --schedule 1f1b --stages 2 --recompute always": (
        Cluster.of(["cpu"] * 3),
        {"schedule": "1f1b", "stages": 2, "recompute": "always"},
    ),
    "--device 1GiB --device 2GiB@0.5 --bandwidth 1GB/s --schedule interleaved-1f1b --chunks 2": (
        DESCRIBED,
        {"schedule": "interleaved-1f1b", "chunks": 2},
    ),
    "--cluster cluster.json --memory 1GiB --schedule zb-v --replicas 1 --offload never": (
        DESCRIBED.with_memory("1GiB"),
        {"schedule": "zb-v", "replicas": 1, "offload": "never"},
    ),
    "--devices 2 --reduction batch --allow-split-ties": (
        Cluster.virtual(2),
        {"reduction": "batch", "allow_split_ties": True},
    ),
    "--devices 2 --schedule 1f1b --cut-before 1": (
        Cluster.virtual(2),
        {"schedule": "1f1b", "cut_before": ["1"]},
    ),
    "--devices 2 --schedule 1f1b --colocate 1,2 --colocate 2,3,4": (
        Cluster.virtual(2),
        {"schedule": "1f1b", "colocate": [["1", "2"], ["2", "3", "4"]]},
    ),
    "--cluster cluster.json --stages 2 --compress link=int8 --schedule 1f1b": (
        DESCRIBED,
        {"schedule": "1f1b", "stages": 2, "compress": {"link": "int8"}},
    ),
    "--cluster cluster.json --stages 2 --compress bf16 --schedule 1f1b": (
        DESCRIBED,
        {"schedule": "1f1b", "stages": 2, "compress": "bf16"},
    ),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_plan_is_that_of_the_library(planned: Planned, options: str) -> None:
    cluster, keywords = OPTIONS[options]
    DESCRIBED.save("cluster.json")
    made = planned(f"{options} -o plan.json")
    assert made == plan(Profile.load("saved.json"), cluster, **keywords) == Plan.load("plan.json")


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


def test_auto_measures_sizes_that_the_mini_batch_has(run: Run, directory: Path) -> None:
    """Of twelve samples: parts have two each at least."""
    made = run("plan models.py:whole --devices 2 --schedule 1f1b --time-budget 0 --json").stdout
    assert Plan.model_validate_json(made).micro_batches in {2, 4, 6}
