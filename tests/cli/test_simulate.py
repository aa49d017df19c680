"""``pipepart simulate``: schedules on the stages of a plan or of numbers, and the files that -o saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import schedules
from pipepart import Cluster, Plan, Profile, plan
from pipepart.cli.simulated import Simulated, on_plan

Run = Callable[..., Result]
SIZES = "--devices 4 --micro-batches 8"
NUMBERS = f"--schedule 1f1b {SIZES}"


@pytest.fixture
def planned(measured: Profile, directory: Path) -> Plan:
    """Two stages under 1f1b in ``plan.json``."""
    made = plan(measured, Cluster.virtual(2, memory="1GiB"), schedule="1f1b", micro_batches=4, stages=2)
    made.save(directory / "plan.json")
    return made


@pytest.fixture
def figures(run: Run) -> Callable[[str], Any]:
    """The figures of a step that a command line simulates."""

    def figures(line: str) -> Any:
        (step,) = json.loads(run(f"simulate {line} --json").stdout)["schedules"]
        return step

    return figures


Figures = Callable[[str], Any]


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


def test_a_plan_with_replicas_is_played_with_them(figures: Figures, planned: Plan) -> None:
    """On the devices of the two stages, and on further ones of their copies."""
    copies = {"cluster": Cluster.virtual(4, memory="1GiB"), "replica_devices": (("virtual:2", "virtual:3"),)}
    with_replicas = planned.model_copy(update=copies).refreshed()
    with_replicas.save("plan.json")
    found = figures("plan.json")
    assert found["makespan_seconds"] == with_replicas.predicted.step_seconds
    assert [device["device"] for device in found["devices"]] == [f"virtual:{index}" for index in range(4)]
    gpipe = with_replicas.model_copy(update={"schedule": "gpipe"})
    assert figures("plan.json --schedule gpipe")["makespan_seconds"] <= gpipe.simulate().makespan * (
        1 + 1e-12
    )


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
    run: Run, planned: Plan
) -> None:
    run(f"simulate --schedule 1f1b --schedule zb-v {SIZES} -o a.svg")
    picture = Path("a.svg").read_text()
    for text in ('width="900"', "1f1b: a step of 33 s, 27% idle", "zb-v: a step of 25.5 s, 6% idle"):
        assert text in picture
    assert "memory," in run("simulate plan.json --schedule 1f1b --schedule gpipe -o a.svg").stdout
    assert "virtual:1" in Path("a.svg").read_text()
