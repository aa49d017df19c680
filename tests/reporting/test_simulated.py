"""What is printed of a schedule that was played."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import RenderableType

import schedules
from pipepart.reporting import idle_table, simulation_summary

Printed = Callable[[RenderableType], str]
COSTS = schedules.StageCosts([1, 1], [1, 1], [1, 1], latency=0.5, stash_bytes=[1024, 2048])


def played(name: str, micro_batches: int = 4) -> schedules.Timeline:
    return schedules.simulate(schedules.build(name, devices=2, micro_batches=micro_batches), COSTS)


def test_idle_time_is_told_by_its_cause(printed: Printed) -> None:
    timeline = played("1f1b")
    idle = timeline.idle[1]
    text = printed(idle_table(timeline, ["one", "two"]))
    line = next(line.split() for line in text.splitlines() if line.startswith("two"))
    figures = [timeline.busy[1], idle.producer, idle.transfer, idle.finished]
    assert line[:6] == ["two", "1", *(f"{each:.2f}" for each in figures)]
    assert line[-2:] == ["2.0", "KiB"]


def test_a_device_that_needs_more_than_its_limit_is_named(printed: Printed) -> None:
    text = printed(idle_table(played("1f1b"), ["one", "two"], needs=[3072, 4096], limits=[4096, 2048]))
    assert "Does not fit: two needs 4.0 KiB and has 2.0 KiB." in text
    assert "Does not fit: one" not in text


def test_micro_batches_in_flight_are_counted(printed: Printed) -> None:
    counted = schedules.StageCosts([1, 1], [1, 1], [1, 1], stash_bytes=[1, 1])
    timeline = schedules.simulate(schedules.build("1f1b", devices=2, micro_batches=4), counted)
    lines = printed(idle_table(timeline, counted=True)).splitlines()
    assert "in flight," in lines[2]
    assert [line.split()[-1] for line in lines[5:7]] == ["2", "1"]


@pytest.mark.parametrize(
    ("bound", "says"),
    [(12.0, "this one is at most 41.7% above the best"), (17.0, "on these devices is shorter")],
)
def test_the_bound_says_how_good_the_schedule_is(printed: Printed, bound: float, says: str) -> None:
    timeline = played("1f1b")
    assert timeline.makespan == 17.0
    assert says in printed(simulation_summary(timeline, bound))


def test_schedules_are_compared_by_the_micro_batch(printed: Printed) -> None:
    own = played("1f1b")
    longer = printed(simulation_summary(played("sequential"), own=own))
    assert "64.7% longer than the plan's own 1f1b with 4 micro-batches (17.00 s)" in longer
    assert "shorter a micro-batch than the plan's own" in printed(
        simulation_summary(played("1f1b", 8), own=own)
    )
    assert "own" not in printed(simulation_summary(own, own=own))


def test_an_asynchronous_schedule_is_said_to_change_the_numbers(printed: Printed) -> None:
    assert "not the numbers of plain training" in printed(simulation_summary(played("pipedream")))
