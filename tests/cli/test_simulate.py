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
from pipepart.cli.simulated import on_plan

Run = Callable[[str], Result]
SIZES = "--devices 4 --micro-batches 8"
NUMBERS = f"--schedule 1f1b {SIZES}"


@pytest.fixture
def planned(measured: Profile, directory: Path) -> Plan:
    """Two stages under 1f1b in ``plan.json``."""
    made = plan(measured, Cluster.virtual(2, memory="1GiB"), schedule="1f1b", micro_batches=4, stages=2)
    made.save(directory / "plan.json")
    return made


def figures(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    (step,) = json.loads(result.stdout)["schedules"]
    return step


def test_numbers_describe_stages(run: Run) -> None:
    result = run(f"simulate {NUMBERS} --forward 1 --backward-input 1 --backward-weight 1")
    assert "33.00 s" in result.stdout
    assert "27% of the devices' time is idle" in result.stdout
    assert "Devices: busy and idle" in result.stdout
    assert "Timeline of one step" in result.stdout


def test_the_figures_are_those_of_the_library(run: Run) -> None:
    found = figures(run(f"simulate {NUMBERS} --forward 1,2,1,1 --latency 0.5 --stash 1KiB --json"))
    costs = schedules.StageCosts([1, 2, 1, 1], [1] * 4, [1] * 4, latency=0.5, stash_bytes=[1024] * 4)
    timeline = schedules.simulate(schedules.build("1f1b", devices=4, micro_batches=8), costs)
    assert found["makespan_seconds"] == timeline.makespan
    assert found["bubble"] == timeline.bubble
    assert [device["peak_stash_bytes"] for device in found["devices"]] == [4096, 3072, 2048, 1024]
    assert [device["producer_seconds"] for device in found["devices"]] == [
        idle.producer for idle in timeline.idle
    ]


def test_the_plans_own_schedule_takes_what_was_predicted(run: Run, planned: Plan) -> None:
    found = figures(run("simulate plan.json --json"))
    assert found["makespan_seconds"] == pytest.approx(planned.predicted.step_seconds, rel=1e-12)
    assert [device["device"] for device in found["devices"]] == ["virtual:0", "virtual:1"]


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


def test_what_does_not_fit_is_said(run: Run, planned: Plan, directory: Path) -> None:
    held = max(planned.predicted.memory_bytes)
    devices = [device.model_copy(update={"memory_bytes": held}) for device in planned.cluster.devices]
    tight = planned.cluster.model_copy(update={"devices": tuple(devices)})
    planned.model_copy(update={"cluster": tight}).save(directory / "plan.json")
    assert "does not fit" not in run("simulate plan.json").stdout
    assert "does not fit: virtual:" in run("simulate plan.json --schedule gpipe --micro-batches 64").stdout


def test_a_schedule_is_written_as_csv_and_read_again(run: Run, planned: Plan, directory: Path) -> None:
    first = figures(run("simulate plan.json --schedule zb-h1 -o order.csv --json"))
    assert (directory / "order.csv").read_text() == schedules.build(
        "zb-h1", devices=2, micro_batches=4
    ).to_csv()
    again = figures(run("simulate plan.json --schedule order.csv --json"))
    assert again["actions"] == first["actions"]
    assert again["makespan_seconds"] == first["makespan_seconds"]


def test_forwards_that_a_plan_runs_again_are_played(run: Run, measured: Profile, directory: Path) -> None:
    made = plan(measured, Cluster.virtual(2), schedule="1f1b", micro_batches=4, recompute="always")
    made.save(directory / "plan.json")
    found = figures(run("simulate plan.json -o order.csv --json"))
    assert found["makespan_seconds"] == pytest.approx(made.predicted.step_seconds, rel=1e-12)
    assert "0RECOMPUTE0" in found["actions"][0]
    again = figures(run("simulate plan.json --schedule order.csv --json"))
    assert again == {**found, "schedule": "search"}


@pytest.fixture
def with_replicas(planned: Plan, directory: Path) -> Plan:
    """The two stages and a copy of them on further devices, in ``plan.json``."""
    cluster = Cluster.virtual(4, memory="1GiB")
    made = planned.model_copy(
        update={"cluster": cluster, "replica_devices": (("virtual:2", "virtual:3"),)}
    ).refreshed()
    made.save(directory / "plan.json")
    return made


def test_a_plan_with_replicas_is_played_with_them(run: Run, with_replicas: Plan) -> None:
    found = figures(run("simulate plan.json --json"))
    assert found["makespan_seconds"] == with_replicas.predicted.step_seconds
    assert [device["device"] for device in found["devices"]] == [f"virtual:{index}" for index in range(4)]
    gpipe = with_replicas.model_copy(update={"schedule": "gpipe"})
    found = figures(run("simulate plan.json --schedule gpipe --json"))
    assert found["makespan_seconds"] <= gpipe.simulate().makespan * (1 + 1e-12)


def simulated(name: str) -> schedules.Timeline:
    """Return a schedule whose devices take 1 second for each part of a micro-batch, whatever their stages."""
    order = schedules.build(name, devices=4, micro_batches=8)
    each = [4 / order.model_stages] * order.model_stages
    return schedules.simulate(order, schedules.StageCosts(each, each, each, stash_bytes=each))


def test_the_suffix_says_what_is_saved(run: Run, directory: Path) -> None:
    result = run(f"simulate --schedule zb-v {SIZES} -o a.svg -o a.csv -o a.json")
    assert result.exit_code == 0, result.stderr
    timeline = simulated("zb-v")
    assert (directory / "a.svg").read_text() == timeline.svg()
    assert (directory / "a.csv").read_text() == timeline.schedule.to_csv()
    saved = json.loads((directory / "a.json").read_text())
    assert saved == json.loads(run(f"simulate --schedule zb-v {SIZES} --json").stdout)
    assert saved["schedules"][0]["makespan_seconds"] == timeline.makespan


def test_several_schedules_share_a_picture(run: Run, directory: Path) -> None:
    result = run(f"simulate --schedule 1f1b --schedule zb-v {SIZES} -o a.svg")
    assert result.exit_code == 0, result.stderr
    picture = (directory / "a.svg").read_text()
    assert 'width="900"' in picture
    assert "1f1b: a step of 33 s, 27% idle" in picture
    assert "zb-v: a step of 25.5 s, 6% idle" in picture


def test_a_plan_under_several_schedules_has_its_memory_and_devices(
    run: Run, measured: Profile, directory: Path
) -> None:
    made = plan(measured, Cluster.virtual(2, memory="1GiB"), schedule="1f1b", micro_batches=4, stages=2)
    made.save(directory / "plan.json")
    result = run("simulate plan.json --schedule 1f1b --schedule gpipe -o a.svg")
    assert result.exit_code == 0, result.stderr
    assert "memory," in result.stdout
    assert "virtual:1" in (directory / "a.svg").read_text()
