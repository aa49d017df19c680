"""``pipepart plan``, ``explain`` and ``simulate``: what they print and save is what the library plans and simulates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import schedules
from pipepart import Cluster, Plan, Profile, Trace, plan
from pipepart.cli.simulated import Simulated, on_plan
from pipepart.units import format_bytes, format_seconds

Run = Callable[..., Result]


Planned = Callable[[str], Plan]
DESCRIBED = Cluster.parse(["1GiB", "2GiB@0.5"], link="1GB/s")

TWO = Cluster.virtual(2)

# Options, and the cluster and the keywords that they stand for.
OPTIONS: dict[str, tuple[Cluster, dict[str, Any]]] = {
    "--devices 2 --schedule gpipe --micro-batches 4": (TWO, {"schedule": "gpipe", "micro_batches": 4}),
    "--devices 2 --reduction batch --allow-split-ties": (TWO, {"reduction": "batch", "allow_split_ties": True}),
    "--devices 2 --schedule 1f1b --cut-before 1": (TWO, {"schedule": "1f1b", "cut_before": ["1"]}),
    "--devices 2 --schedule 1f1b --colocate 1,2 --colocate 2,3,4": (
        TWO,
        {"schedule": "1f1b", "colocate": [["1", "2"], ["2", "3", "4"]]},
    ),
    "--devices cpu,cpu,cpu --schedule 1f1b --stages 2 --recompute always": (
        Cluster.of(["cpu"] * 3),
        {"schedule": "1f1b", "stages": 2, "recompute": "always"},
    ),
    "--device 1GiB --device 2GiB@0.5 --bandwidth 1GB/s --schedule interleaved-1f1b --chunks 2 --compress bf16": (
        DESCRIBED,
        {"schedule": "interleaved-1f1b", "chunks": 2, "compress": "bf16"},
    ),
    "--cluster cluster.json --memory 1GiB --schedule zb-v --replicas 1 --offload never --compress link=int8": (
        DESCRIBED.with_memory("1GiB"),
        {"schedule": "zb-v", "replicas": 1, "offload": "never", "compress": {"link": "int8"}},
    ),
}  # fmt: skip


@pytest.fixture
def planned(run: Run, saved: str) -> Planned:
    """Plans the saved profile with options."""
    return lambda options: Plan.model_validate_json(run(f"plan {saved} {options} --json").stdout)


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
    best = "Options to add that fit, the shortest step first"
    assert ("Use larger devices:" if "1KiB" in request_of else best) in told
    lines = re.findall(r"^  \d+\. (.+): (.+) a step.*, at most (.+) on a device$", told, re.MULTILINE)
    assert lines
    for options, step, memory in lines:
        predicted = planned(f"{request_of} {options}").predicted
        assert step == format_seconds(predicted.step_seconds)
        assert memory == format_bytes(max(predicted.memory_bytes))


def test_auto_measures_sizes_that_the_mini_batch_has(run: Run, directory: Path) -> None:
    """Of twelve samples: parts have two each at least."""
    made = run("plan models.py:whole --devices 2 --schedule 1f1b --time-budget 0 --json").stdout
    assert Plan.model_validate_json(made).micro_batches in {2, 4, 6}


@pytest.fixture(scope="module")
def three_stages(measured: Profile) -> Plan:
    """A plan of three stages, with alternatives."""
    return plan(measured, Cluster.virtual(3), cut_before=["1", "3"])


@pytest.fixture
def saved_plan(three_stages: Plan, directory: Path) -> Plan:
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


def test_a_plan_is_shown_whole_and_an_edited_one_has_new_figures(run: Run, saved_plan: Plan) -> None:
    old = run("explain plan.json").stdout
    for title in ("Plan", "Stages: time", "Devices: ", "Alternatives", "Predicted timeline"):
        assert title in old
    edit(move_layer_2_to_the_last_stage)
    step = format_seconds(Plan.load("plan.json").predicted.step_seconds)
    assert f"{step} predicted" in run("explain plan.json").stdout
    assert f"{step} predicted" not in old


def test_two_plans_and_a_measured_step_are_held_against_a_plan(run: Run, saved_plan: Plan) -> None:
    saved_plan.save("other.json")
    assert run("explain plan.json other.json").stdout.startswith("The plans are equal")
    edit(move_layer_2_to_the_last_stage)
    assert "1 layer in another stage or on another device" in run("explain plan.json other.json").stdout
    saved_plan.save("plan.json")
    Trace(saved_plan, [saved_plan.simulate()]).save("trace.json")
    shown = run("explain plan.json --trace trace.json").stdout
    assert "the median is as predicted (ratio 1.00)" in shown
    assert "Measured timeline of the median step" in shown


SIZES = "--devices 4 --micro-batches 8"
NUMBERS = f"--schedule 1f1b {SIZES}"


@pytest.fixture
def two_stages(measured: Profile, directory: Path) -> Plan:
    """Two stages under 1f1b in ``plan.json``."""
    made = plan(measured, Cluster.virtual(2, memory="1GiB"), schedule="1f1b", micro_batches=4, stages=2)
    made.save(directory / "plan.json")
    return made


Figures = Callable[[str], Any]


@pytest.fixture
def figures(run: Run) -> Figures:
    """The figures of a step that a command line simulates."""

    def figures(line: str) -> Any:
        (step,) = json.loads(run(f"simulate {line} --json").stdout)["schedules"]
        return step

    return figures


def test_the_figures_are_those_of_the_library(run: Run, figures: Figures) -> None:
    assert "27% of the devices' time is idle" in run(f"simulate {NUMBERS} --forward 1").stdout
    found = figures(f"{NUMBERS} --forward 1,2,1,1 --latency 0.5 --stash 1KiB")
    costs = schedules.StageCosts([1, 2, 1, 1], [1] * 4, [1] * 4, latency=0.5, stash_bytes=[1024] * 4)
    timeline = schedules.simulate(schedules.build("1f1b", devices=4, micro_batches=8), costs)
    assert (found["makespan_seconds"], found["bubble"]) == (timeline.makespan, timeline.bubble)
    assert [device["peak_stash_bytes"] for device in found["devices"]] == [4096, 3072, 2048, 1024]
    waits = [device["producer_seconds"] for device in found["devices"]]
    assert waits == [idle.producer for idle in timeline.idle]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_a_plan_under_another_schedule_has_the_figures_of_a_plan_for_it(
    measured: Profile, schedule: str
) -> None:
    gpipe, expected = (
        plan(measured, Cluster.virtual(2), schedule=name, micro_batches=4, cut_before=["2"])
        for name in ("gpipe", schedule)
    )
    found = on_plan(gpipe, schedule, None).plan
    assert found is not None
    assert found.predicted.step_seconds == expected.predicted.step_seconds
    assert found.predicted.memory_bytes == expected.predicted.memory_bytes


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_schedule_is_written_as_csv_and_read_again(
    figures: Figures, measured: Profile, directory: Path, recompute: Any
) -> None:
    """With the forwards that a plan runs again."""
    made = plan(measured, Cluster.virtual(2), schedule="1f1b", micro_batches=4, recompute=recompute)
    made.save("plan.json")
    found = figures("plan.json -o order.csv")
    assert found["makespan_seconds"] == pytest.approx(made.predicted.step_seconds, rel=1e-12)
    assert ("0RECOMPUTE0" in found["actions"][0]) == (recompute == "always")
    assert figures("plan.json --schedule order.csv") == {**found, "schedule": "search"}


def test_a_plan_with_replicas_is_played_with_them(figures: Figures, two_stages: Plan) -> None:
    """On the devices of the two stages, and on further ones of their copies."""
    copies = {"cluster": Cluster.virtual(4, memory="1GiB"), "replica_devices": (("virtual:2", "virtual:3"),)}
    with_replicas = two_stages.model_copy(update=copies).refreshed()
    with_replicas.save("plan.json")
    found = figures("plan.json")
    assert found["makespan_seconds"] == with_replicas.predicted.step_seconds
    assert [device["device"] for device in found["devices"]] == [f"virtual:{index}" for index in range(4)]
    gpipe = with_replicas.model_copy(update={"schedule": "gpipe"})
    found, most = figures("plan.json --schedule gpipe"), gpipe.simulate().makespan
    assert found["makespan_seconds"] <= most * (1 + 1e-12)


@pytest.mark.parametrize(("schedule", "known"), [("1f1b", True), ("pipedream", False), ("chimera", False)])
def test_versions_of_weights_and_replicas_have_no_bound(schedule: str, known: bool) -> None:
    order = schedules.build(schedule, devices=2, micro_batches=4)
    costs = schedules.StageCosts([1, 1], [1, 1], [1, 1])
    step = Simulated(schedules.simulate(order, costs), costs, ["one", "two"])
    assert (step.bound > 0) is known


def test_the_suffix_says_what_is_saved(run: Run) -> None:
    """Of devices that take 1 second for each part of a micro-batch, whatever their stages."""
    run(f"simulate --schedule zb-v {SIZES} -o a.svg -o a.csv -o a.json")
    order = schedules.build("zb-v", devices=4, micro_batches=8)
    each = [4 / order.model_stages] * order.model_stages
    timeline = schedules.simulate(order, schedules.StageCosts(each, each, each, stash_bytes=each))
    assert Path("a.svg").read_text() == timeline.svg()
    assert Path("a.csv").read_text() == timeline.schedule.to_csv()
    saved = json.loads(Path("a.json").read_text())
    assert saved == json.loads(run(f"simulate --schedule zb-v {SIZES} --json").stdout)
    assert saved["schedules"][0]["makespan_seconds"] == timeline.makespan


def test_several_schedules_share_a_picture_and_those_of_a_plan_have_its_memory_and_devices(
    run: Run, two_stages: Plan
) -> None:
    run(f"simulate --schedule 1f1b --schedule zb-v {SIZES} -o a.svg")
    picture = Path("a.svg").read_text()
    for text in ('width="900"', "1f1b: a step of 33 s, 27% idle", "zb-v: a step of 25.5 s, 6% idle"):
        assert text in picture
    assert "memory," in run("simulate plan.json --schedule 1f1b --schedule gpipe -o a.svg").stdout
    assert "virtual:1" in Path("a.svg").read_text()
