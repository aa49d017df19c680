"""The page of the report as text: it needs nothing from outside, keeps names as text, and says what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import schedules
from pipepart import Cluster, Plan, Trace, plan
from pipepart.planning.plans.stage_plan import StagePlan
from pipepart.reporting.report import Run, report_html
from pipepart.reporting.report.summary import summary_section
from tests.support.made_profiles import made_profile


def test_the_page_begins_with_the_verdict_and_needs_no_network(two_stages: Plan):
    html = two_stages.to_html()
    assert titles(html) == ["Summary", "Timelines", "Memory", "Stages", "Layers", "Rejected plans"]
    assert html.index('class="verdict"') < html.index('class="findings"') < html.index("<svg")
    assert not re.findall(r"(?:src|href)=\"(?!#|data:,)", html)
    assert "http" not in html.replace("http-equiv", "")


def test_the_verdict_holds_the_measured_step_against_one_device(two_stages: Plan):
    one_device = two_stages.predicted.serial_seconds
    costs = two_stages.stage_costs()
    slow = replace(costs, forward=[100 * seconds for seconds in costs.forward])
    measured = schedules.simulate(two_stages.build_schedule(), slow)
    (predicted,) = summary_section([Run(two_stages)])
    assert (
        predicted.verdict
        == f"{one_device / two_stages.predicted.step_seconds:.2f} times as fast as one device"
    )
    assert "predicted" in predicted.reason
    (slower,) = summary_section([Run(two_stages, Trace(two_stages, [measured]))])
    times = one_device / measured.makespan
    assert slower.verdict == f"Slower than one device: {times:.2f} times as fast as one device"
    assert "measured" in slower.reason


def test_names_stay_text(two_stages: Plan):
    name = "</script><img src=x onerror=alert(1)>"
    document = json.loads(two_stages.model_dump_json().replace("virtual:0", name))
    html = Plan.model_validate(document).to_html()
    assert name not in html
    assert "<img" not in html
    assert "&lt;/script&gt;&lt;img" in html


def test_a_trace_adds_the_measured_step_and_the_actions_against_the_prediction(two_stages: Plan):
    html = Trace(two_stages, [two_stages.simulate()]).to_html()
    assert captions(html) == ["predicted", "measured"]
    assert "Actions: median" in html
    assert "Actions: median" not in two_stages.to_html()


def test_a_step_of_many_actions_is_drawn_without_a_box_for_each():
    names = [f"layers.{number}" for number in range(8)]
    profile = made_profile(names, batch=512, micro_batches=(512,))
    made = plan(profile, Cluster.virtual(8), schedule="1f1b", micro_batches=512, stages=8, seconds=1)
    html = made.to_html()
    assert len(html) < 500_000
    assert html.count('class="row"') == 8
    assert html.count("M0 0H") == 1
    assert "ui.perfetto.dev" in html


def test_two_runs_of_one_plan_have_one_prediction(two_stages: Plan):
    step = two_stages.simulate()
    html = report_html(*(Run(two_stages, Trace(two_stages, [step]), name) for name in ("before", "after")))
    assert captions(html) == ["predicted", "before: measured", "after: measured"]
    assert titles(html)[1] == "Differences"
    assert "The plans are equal" in html
    assert html.count("Plans considered") == html.count("Stages: time for one micro-batch") == 1
    assert html.count("Actions: median") == 2


def test_two_plans_stand_on_one_axis(two_stages: Plan, again: Plan):
    html = report_html(Run(two_stages, name="kept"), Run(again, name="again"))
    assert captions(html) == ["kept: predicted", "again: predicted"]
    assert "The step of again is predicted" in html
    ends = [float(each) for each in re.findall(r'class="idle" width="([0-9.]+)%"', html)]
    own, other = two_stages.predicted.step_seconds, again.predicted.step_seconds
    assert ends[::2] == pytest.approx([100 * own / max(own, other), 100 * other / max(own, other)], abs=1e-3)


def test_a_plan_written_by_hand_has_its_stages_and_its_measured_step_only():
    cluster = Cluster.virtual(2)
    stages = tuple(
        StagePlan(layers=(str(at),), device=device.name) for at, device in enumerate(cluster.devices)
    )
    made = Plan(stages=stages, cluster=cluster, schedule="1f1b", micro_batches=2)
    html = made.to_html()
    assert titles(html) == ["Summary", "Stages"]
    assert "written by hand" in html
    costs = schedules.StageCosts([1, 1], [1, 1], [1, 1])
    measured = Trace(made, [schedules.simulate(made.build_schedule(), costs)])
    assert titles(measured.to_html()) == ["Summary", "Timelines", "Stages"]


@pytest.mark.parametrize("count", [0, 3])
def test_a_report_shows_one_run_or_two(two_stages: Plan, count: int):
    with pytest.raises(ValueError, match=f"one plan, or two side by side; got {count}"):
        report_html(*[Run(two_stages)] * count)


def titles(html: str) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", html)


def captions(html: str) -> list[str]:
    """The names of the timelines, in their order."""
    timelines = html[html.index('id="timelines"') : html.index('id="memory"')]
    return re.findall(r"<figcaption>(.*?) <small>", timelines)


def test_the_memory_has_the_measured_peaks(two_stages: Plan):
    trace = Trace(two_stages, [two_stages.simulate()])
    trace.memory_bytes = {device.name: 3 * 2**20 for device in two_stages.workers}
    assert trace.to_html().count("measured peak 3.0 MiB") == 2
    assert "measured peak" not in two_stages.to_html()


def test_plans_of_two_models_are_said_not_to_compare(two_stages: Plan):
    other = two_stages.model_copy(
        update={"profile": two_stages.profile.model_copy(update={"model": "Other"})}  # type: ignore[union-attr]
    )
    html = report_html(Run(two_stages, name="one"), Run(other, name="two"))
    assert "The plans are of two models, Sequential and Other: their figures do not compare." in html
    assert "is predicted" not in html[html.index('id="differences"') : html.index('id="timelines"')]
