"""The summary of a plan, its picture, and the plan against the steps that ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import RenderableType

from pipepart import Plan
from pipepart.reporting import drawn_timeline, measured_against_plan, plan_summary

Printed = Callable[[RenderableType], str]


def test_the_summary_tells_schedule_step_speed_up_bubble_and_bottleneck(
    printed: Printed, two_stages: Plan
) -> None:
    text = printed(plan_summary(two_stages))
    predicted = two_stages.predicted
    assert "1f1b, 4 micro-batches, 2 stages on 2 devices" in text
    assert f"{predicted.serial_seconds / predicted.step_seconds:.2f}, against 50 ms" in text
    assert f"{predicted.bubble:.0%} of the devices' time" in text
    assert "no cut of these layers into 2 stages on these devices has a smaller one" in text


def test_a_plan_written_by_hand_has_a_summary_too(printed: Printed, two_stages: Plan) -> None:
    by_hand = two_stages.model_copy(update={"prediction": None})
    assert "written by hand" in printed(plan_summary(by_hand))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_timeline_is_as_wide_as_the_terminal(
    printed: Printed, two_stages: Plan, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = printed(drawn_timeline(two_stages.simulate())).splitlines()
    assert [len(line) for line in lines if "|" in line] == [width, width]


def test_measured_steps_are_held_against_the_prediction(printed: Printed, two_stages: Plan) -> None:
    predicted = two_stages.predicted.step_seconds
    line = printed(measured_against_plan(two_stages, [predicted * factor for factor in (1, 1.25, 9)]))
    assert "(median of 3): 25% longer" in line
    assert "shorter" in printed(measured_against_plan(two_stages, [predicted * 0.8]))
    assert "as predicted" in printed(measured_against_plan(two_stages, [predicted]))


def test_no_measured_step_is_refused(two_stages: Plan) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measured_against_plan(two_stages, [])
