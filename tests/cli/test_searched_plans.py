"""A plan with a searched order, in which devices have different numbers of stages: shown, simulated, held to a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import schedules
from pipepart import Cluster, Plan, Profile
from pipepart.planning import StagePlan
from pipepart.planning.plans.searched_order import order_text
from pipepart.runtime.observe.trace import Trace

Run = Callable[[str], Result]

PLACEMENT = (0, 1, 0, 1, 0)


@pytest.fixture
def uneven(measured: Profile, directory: Path) -> Plan:
    """A stage for each of the five layers, three of them on the first of two used devices; one is left out."""
    names = ("virtual:2", "virtual:0")
    stages = tuple(
        StagePlan(layers=(info.name,), device=names[row])
        for info, row in zip(measured.layers, PLACEMENT, strict=True)
    )
    ones = [1.0] * 5
    order = schedules.search(schedules.StageCosts(ones, ones, ones), 2, 4, placement=PLACEMENT, effort=0.01)
    made = Plan(
        stages=stages,
        cluster=Cluster.virtual(3),
        schedule="search",
        micro_batches=4,
        actions=order_text(order),
        profile=measured.model_copy(update={"costs": (measured.at(4),)}),
    ).refreshed()
    made.save(directory / "uneven.json")
    return made


def test_its_stages_under_other_orders(run: Run, uneven: Plan) -> None:
    (own,) = json.loads(run("simulate uneven.json --json").stdout)["schedules"]
    assert own["makespan_seconds"] == pytest.approx(uneven.predicted.step_seconds, rel=1e-12)
    (fewer,) = json.loads(run("simulate uneven.json --micro-batches 2 --json").stdout)["schedules"]
    assert [len(row) for row in fewer["actions"]] < [len(row) for row in own["actions"]]
    more = run("simulate uneven.json --micro-batches 8")
    assert more.exit_code == 2
    assert "plan again" in " ".join(more.stderr.split())


def test_a_run_of_another_order_of_the_same_stages_is_refused(
    run: Run, uneven: Plan, directory: Path
) -> None:
    order = [list(row) for row in uneven.actions]
    last = next(at for at, text in enumerate(order[0]) if text == "0F3")
    order[0].insert(0, order[0].pop(last))
    other = uneven.model_copy(update={"actions": tuple(map(tuple, order))})
    Trace(other, [other.simulate()]).save(directory / "trace.json")
    told = run("explain uneven.json --trace trace.json")
    assert told.exit_code == 2
    assert "trace.json is no step of uneven.json: action 0 of device 0 is 0F3" in " ".join(
        told.stderr.split()
    )
