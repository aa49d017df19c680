"""What is printed of steps that were traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import RenderableType

from pipepart import Plan, Trace
from pipepart.reporting import action_table, idle_table, trace_reports, trace_summary
from schedules import Kind, Timeline

Printed = Callable[[RenderableType], str]


def stretched(step: Timeline, factor: float) -> Timeline:
    """The same step at another pace."""
    starts, ends = ([[factor * time for time in row] for row in times] for times in (step.starts, step.ends))
    moved = [t._replace(start=factor * t.start, end=factor * t.end) for t in step.transfers]
    return Timeline(step.schedule, starts, ends, transfers=moved)


def late(step: Timeline, stage: int, seconds: float) -> Timeline:
    """The same step, the forwards of a stage longer: in it each action has more than enough room for that."""
    ends = [
        [
            end + seconds * (action.kind is Kind.F and action.stage == stage)
            for action, end in zip(row, row_ends, strict=True)
        ]
        for row, row_ends in zip(step.schedule.actions, step.ends, strict=True)
    ]
    return Timeline(step.schedule, step.starts, ends)


def lines(text: str, label: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(label)]


def test_steps_are_held_against_the_prediction(printed: Printed, two_stages: Plan):
    predicted = two_stages.simulate()
    trace = Trace(two_stages, [stretched(predicted, factor) for factor in (2.0, 1.0, 1.25)])
    text = printed(trace_summary(trace))
    assert "3 traced, median" in text
    assert "the median is 25% longer (ratio 0.80)" in lines(text, "predicted")[0]
    bubble = f"{predicted.bubble:.0%}"
    assert f"{bubble} of the devices' time is idle, {bubble} predicted" in text


def test_the_worst_deviation_comes_first(printed: Printed, two_stages: Plan):
    step = two_stages.simulate()
    text = printed(action_table(Trace(two_stages, [late(step, 1, 0.5e-3)])))
    first = text.splitlines()[4].split()
    forward = step.ends[1][0] - step.starts[1][0]
    assert first[:2] == ["1", "forward"]
    assert f"{0.5e-3 / forward:+.0%}" in first
    assert text.splitlines()[5].split()[-2] == "+0%"


def test_a_device_that_starts_late_is_told_from_one_that_waits(printed: Printed, two_stages: Plan):
    step = stretched(two_stages.simulate(), 1.0)
    assert "Delay:" not in printed(idle_table(step))
    starts = [[start + 1e-4 * (row == 1) for start in line] for row, line in enumerate(step.starts)]
    ends = [[end + 1e-4 * (row == 1) for end in line] for row, line in enumerate(step.ends)]
    assert "Delay:" in printed(idle_table(Timeline(step.schedule, starts, ends, transfers=step.transfers)))


def test_all_of_a_trace_prints(printed: Printed, two_stages: Plan):
    trace = Trace(two_stages, [two_stages.simulate()])
    texts = list(map(printed, trace_reports(trace)))
    assert [text.splitlines()[0].split(":")[0] for text in texts[:3]] == [
        "Trace",
        "Devices",
        "Actions",
    ]
    assert texts[3].startswith("Measured timeline of the median step")


def test_a_trace_without_a_step_says_what_to_do(two_stages: Plan):
    with pytest.raises(ValueError, match=r"run pipe\.step within"):
        trace_reports(Trace(two_stages))
