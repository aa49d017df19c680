"""What is told of a plan beside its tables: what would fit, edits, and the width of the timeline."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import RenderableType

from pipepart import Cluster, InfeasiblePlanError, Plan, Profile, Trace, plan
from pipepart.reporting import (
    drawn_timeline,
    infeasible_report,
    plan_reports,
    plan_summary,
    trace_reports,
)
from pipepart.units import format_seconds

Printed = Callable[[RenderableType], str]


def test_the_figures_of_the_summary_are_those_of_the_prediction(
    printed: Printed, two_stages: Plan, four_chunks: Plan
) -> None:
    text, predicted = printed(plan_summary(two_stages)), two_stages.predicted
    assert f"{predicted.serial_seconds / predicted.step_seconds:.2f}, against 50 ms" in text
    assert f"{predicted.bubble:.0%} of the devices' time" in text
    assert f"micro-batches takes less than {format_seconds(two_stages.step_bound)}" in text
    assert f"this step is at most {two_stages.step_gap:.1%} above that" in text
    loads = dict.fromkeys(range(2), 0.0)
    for number, stage in enumerate(four_chunks.stages):
        loads[number % 2] += stage.load_seconds
    assert loads[0] > loads[1]
    assert "stages 0, 2 on device:1, 13 ms per micro-batch" in printed(plan_summary(four_chunks))


def test_what_would_fit_is_told_as_options(printed: Printed, profile: Profile) -> None:
    whole = plan(profile, Cluster.virtual(1), schedule="1f1b", micro_batches=4).predicted.memory_bytes[0]
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(profile, Cluster.virtual(1, memory=whole - 1), schedule="1f1b", micro_batches=4)
    text = printed(infeasible_report(caught.value))
    assert text.startswith("The model does not fit: with 1 stage, 4 micro-batches")
    assert "  1. --more-devices 1: " in text
    assert "cluster=" not in text


@pytest.mark.parametrize("width", [80, 140])
def test_the_timeline_is_as_wide_as_the_terminal(
    printed: Printed, two_stages: Plan, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = printed(drawn_timeline(two_stages.simulate())).splitlines()
    assert [len(line) for line in lines if "|" in line] == [width, width]


def test_all_of_a_plan_and_of_a_trace_prints(printed: Printed, two_stages: Plan) -> None:
    titles = [printed(report).splitlines()[0].split(":")[0] for report in plan_reports(two_stages)]
    assert {"Plan", "Stages", "Devices"} <= set(titles)
    trace = Trace(two_stages, [two_stages.simulate()])
    titles = [printed(report).splitlines()[0] for report in trace_reports(trace)]
    assert [title.split(":")[0] for title in titles[:3]] == ["Trace", "Devices", "Actions"]
    assert titles[3].startswith("Measured timeline of the median step")
    with pytest.raises(ValueError, match=r"run pipe\.step within"):
        trace_reports(Trace(two_stages))
