"""``pipepart simulate``: schedules on the stages of a plan, and on stages described by numbers."""

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
NUMBERS = "--schedule 1f1b --devices 4 --micro-batches 8"


@pytest.fixture
def planned(measured: Profile, directory: Path) -> Plan:
    """Two stages under 1f1b in ``plan.json``."""
    made = plan(measured, Cluster.virtual(2, memory="1GiB"), schedule="1f1b", micro_batches=4)
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


def test_the_stages_of_a_plan_under_another_schedule(run: Run, planned: Plan) -> None:
    assert "gpipe, 6 micro-batches" in run("simulate plan.json --schedule gpipe --micro-batches 6").stdout
    found = figures(run("simulate plan.json --schedule gpipe --micro-batches 6 --json"))
    other = planned.model_copy(update={"schedule": "gpipe", "micro_batches": 6})
    assert found["makespan_seconds"] == pytest.approx(other.simulate().makespan)
    assert found["micro_batches"] == 6


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


def test_a_schedule_that_torch_wrote_is_played_on_a_plan(run: Run, planned: Plan, directory: Path) -> None:
    rows = [
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD",
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RESHARD,1REDUCE_GRAD",
    ]
    (directory / "torch.csv").write_text("\n".join(rows))
    found = figures(run("simulate plan.json --schedule torch.csv --json"))
    named = figures(run("simulate plan.json --schedule 1f1b --micro-batches 2 --json"))
    assert found["makespan_seconds"] >= named["makespan_seconds"] * (1 - 1e-9)
    assert "UNSHARD" not in str(found["actions"])


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


def test_a_plan_is_played_in_both_directions(run: Run, planned: Plan) -> None:
    both = planned.model_copy(update={"schedule": "chimera"})
    found = figures(run("simulate plan.json --schedule chimera --json"))
    assert found["makespan_seconds"] <= both.simulate().makespan * (1 + 1e-12)
    assert [device["device"] for device in found["devices"]] == ["virtual:0", "virtual:1"]


def test_a_schedule_that_moves_stages_is_refused(run: Run, planned: Plan) -> None:
    result = run("simulate plan.json --schedule zb-v")
    assert result.exit_code == 2
    assert "plan again with this schedule" in " ".join(result.stderr.split())
