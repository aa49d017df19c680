"""The page of the report as text: it needs nothing from outside, keeps names as text, and says what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import schedules
from pipepart import Cluster, Plan, Profile, Trace, plan
from pipepart.planning.plans.stage_plan import StagePlan
from pipepart.reporting.report import Run, report_html
from pipepart.reporting.report.memory import memory_section
from pipepart.reporting.report.summary import summary_section
from pipepart.reporting.report.timelines import timelines_section
from schedules.analysis.waits import waits
from tests.planning.problems import Layer, profile_of


def titles(html: str) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", html)


def captions(html: str) -> list[str]:
    """The names of the timelines, in their order."""
    timelines = html[html.index('id="timelines"') : html.index('id="memory"')]
    return re.findall(r"<figcaption>(.*?) <small>", timelines)


def as_predicted(made: Plan) -> Trace:
    return Trace(made, [made.simulate()])


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
    times = one_device / two_stages.predicted.step_seconds
    assert predicted.verdict == f"{times:.2f} times as fast as one device"
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


def test_a_trace_adds_the_measured_step_its_peaks_and_the_actions_against_the_prediction(two_stages: Plan):
    trace = as_predicted(two_stages)
    trace.memory_bytes = {device.name: 3 * 2**20 for device in two_stages.workers}
    html, bare = trace.to_html(), two_stages.to_html()
    assert captions(html) == ["predicted", "measured"]
    assert html.count("measured peak 3.0 MiB") == 2
    assert "Actions: median" in html
    assert "measured peak" not in bare
    assert "Actions: median" not in bare


def test_a_step_of_many_actions_is_drawn_without_a_box_for_each():
    profile = profile_of([Layer(1, 1, 1)] * 8, [512])
    made = plan(profile, Cluster.virtual(8), schedule="1f1b", micro_batches=512, stages=8, seconds=1)
    html = made.to_html()
    assert len(html) < 500_000
    assert html.count('class="row"') == 8
    assert html.count("M0 0H") == 1
    assert "ui.perfetto.dev" in html


def test_two_runs_of_one_plan_have_one_prediction(two_stages: Plan):
    html = report_html(*(Run(two_stages, as_predicted(two_stages), name) for name in ("before", "after")))
    assert captions(html) == ["predicted", "before: measured", "after: measured"]
    assert titles(html)[1] == "Differences"
    assert "The plans are equal" in html
    assert html.count("Plans considered") == html.count("Stages: time for one micro-batch") == 1
    assert html.count("Actions: median") == 2


def test_two_plans_stand_on_one_axis_and_those_of_two_models_do_not_compare(two_stages: Plan, again: Plan):
    html = report_html(Run(two_stages, name="kept"), Run(again, name="again"))
    assert captions(html) == ["kept: predicted", "again: predicted"]
    assert "The step of again is predicted" in html
    ends = [float(each) for each in re.findall(r'class="idle" width="([0-9.]+)%"', html)]
    own, other = two_stages.predicted.step_seconds, again.predicted.step_seconds
    assert ends[::2] == pytest.approx([100 * own / max(own, other), 100 * other / max(own, other)], abs=1e-3)
    assert two_stages.profile is not None
    profile = two_stages.profile.model_copy(update={"model": "Other"})
    html = report_html(Run(two_stages), Run(two_stages.model_copy(update={"profile": profile})))
    assert "The plans are of two models, Sequential and Other: their figures do not compare." in html
    assert "is predicted" not in html[html.index('id="differences"') : html.index('id="timelines"')]


def test_a_plan_written_by_hand_has_its_stages_and_its_measured_step_only():
    cluster = Cluster.virtual(2)
    stages = tuple(StagePlan(layers=(str(at),), device=one.name) for at, one in enumerate(cluster.devices))
    made = Plan(stages=stages, cluster=cluster, schedule="1f1b", micro_batches=2)
    html = made.to_html()
    assert titles(html) == ["Summary", "Stages"]
    assert "written by hand" in html
    step = schedules.simulate(made.build_schedule(), schedules.StageCosts([1, 1], [1, 1], [1, 1]))
    assert titles(Trace(made, [step]).to_html()) == ["Summary", "Timelines", "Stages"]


@pytest.mark.parametrize("count", [0, 3])
def test_a_report_shows_one_run_or_two(two_stages: Plan, count: int):
    with pytest.raises(ValueError, match=f"one plan, or two side by side; got {count}"):
        report_html(*[Run(two_stages)] * count)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_the_waits_of_a_device_sum_up_to_its_idle_time(schedule: str):
    chunks = 2 if schedule.startswith("interleaved") else 1
    seconds = [1, 2, 1] * chunks
    costs = schedules.StageCosts(seconds, seconds, seconds, latency=0.25, stash_bytes=[1] * 3 * chunks)
    timeline = schedules.simulate(schedules.build(schedule, devices=3, micro_batches=6), costs)
    for row, idle in zip(waits(timeline), timeline.idle, strict=True):
        for cause in ("producer", "transfer", "delay"):
            assert sum(getattr(wait, cause) for wait in row) == pytest.approx(getattr(idle, cause))


TWO, FOUR = Cluster.virtual(2), Cluster.virtual(4)
PLANS = {
    "1f1b": {"cluster": TWO},
    "gpipe": {"cluster": TWO, "recompute": "always"},
    "interleaved-1f1b": {"cluster": TWO, "chunks": 2},
    "zb-v": {"cluster": TWO},
    "pipedream": {"cluster": TWO},
    "1f1b, replicas": {"cluster": FOUR, "replicas": 2},
    "1f1b, offloaded": {"cluster": Cluster.parse(["64MiB"] * 2, host_link="25GB/s"), "offload": "stash"},
}


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_of_a_memory_sum_up_to_the_predicted_peak(doubled: Profile, name: str):
    made = plan(doubled, schedule=name.partition(",")[0], micro_batches=4, **PLANS[name])  # type: ignore[arg-type]
    (memory,) = memory_section([Run(made)]) or []
    needs = made.device_bytes()
    widths = {name: sum(piece.percent for piece in pieces) for name, pieces, _ in memory.bars.rows}
    assert set(widths) == set(needs)
    assert all(piece.percent > 0 for _, pieces, _ in memory.bars.rows for piece in pieces)
    for name, width in widths.items():
        assert width / max(widths.values()) == pytest.approx(needs[name] / max(needs.values()), abs=0.005)


def test_boxes_lie_on_the_axis_of_the_longest_step(two_stages: Plan):
    timelines = timelines_section([Run(two_stages, as_predicted(two_stages))])
    assert timelines is not None
    assert [step.end for step in timelines.steps] == [100, 100]
    assert timelines.ticks[0].text == "0"
    for step in timelines.steps:
        boxes = [box for row in step.rows for box in row.boxes if box.look != "gap"]
        assert len(boxes) == sum(map(len, two_stages.build_schedule().actions))
        assert all(0 <= box.left <= box.left + box.width <= 100 + 1e-6 for box in boxes)
    measured = timelines.steps[1].rows[0].boxes[0]
    assert measured.tip.startswith("0F0: forward, stage 0, micro-batch 0\n0 to ")
    assert "\npredicted: " in measured.tip
