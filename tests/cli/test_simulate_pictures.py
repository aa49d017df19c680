"""``pipepart simulate`` with several schedules, and the files that -o saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

import schedules
from pipepart import Cluster, Profile, plan

Run = Callable[[str], Result]
SIZES = "--devices 4 --micro-batches 8"


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


def test_schedules_of_one_model_stand_in_a_table(run: Run) -> None:
    rows = run(f"simulate --schedule 1f1b --schedule zb-v --schedule v-min {SIZES}").stdout.splitlines()
    assert rows[4].split()[:6] == ["1f1b", "4", "33.00", "29%", "longer", "27%"]
    assert rows[5].split()[:4] == ["zb-v", "8", "25.50", "6%"]
    assert rows[6].split()[-1] == "2"  # in flight, at most


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
    made = plan(measured, Cluster.virtual(2, memory="1GiB"), schedule="1f1b", micro_batches=4)
    made.save(directory / "plan.json")
    result = run("simulate plan.json --schedule 1f1b --schedule gpipe -o a.svg")
    assert result.exit_code == 0, result.stderr
    assert "memory," in result.stdout
    assert "virtual:1" in (directory / "a.svg").read_text()
