"""The page of the report as text: it needs nothing from outside, keeps names as text, and says what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import schedules
from pipepart import Cluster, Plan, Profile, Trace, plan
from pipepart.planning.plans.stage_plan import StagePlan
from pipepart.reporting.report import Run, report_html
from pipepart.reporting.report.memory import memory_section
from pipepart.reporting.report.timelines import timelines_section
from schedules.analysis.waits import waits
from tests.planning.problems import Layer, profile_of
from tests.reporting.test_printed import OTHERS
from tests.support.golden import check_golden, text_of


def as_predicted(made: Plan) -> Trace:
    return Trace(made, [made.simulate()])


def slower(made: Plan) -> Trace:
    """A step whose forwards take a hundred times as long as predicted, on devices that hold 3 MiB at most."""
    costs = made.stage_costs()
    slow = replace(costs, forward=[100 * seconds for seconds in costs.forward])
    trace = Trace(made, [schedules.simulate(made.build_schedule(), slow)])
    trace.memory_bytes = {device.name: 3 * 2**20 for device in made.workers}
    return trace


def of_another_model(made: Plan) -> Plan:
    assert made.profile is not None
    return made.model_copy(update={"profile": made.profile.model_copy(update={"model": "Other"})})


def by_hand() -> Plan:
    cluster = Cluster.virtual(2)
    stages = tuple(StagePlan(layers=(str(at),), device=one.name) for at, one in enumerate(cluster.devices))
    return Plan(stages=stages, cluster=cluster, schedule="1f1b", micro_batches=2)


def test_pages_say_what_the_file_has(two_stages: Plan, again: Plan):
    made = by_hand()
    step = schedules.simulate(made.build_schedule(), schedules.StageCosts([1, 1], [1, 1], [1, 1]))
    two_runs = (Run(two_stages, as_predicted(two_stages), name) for name in ("before", "after"))
    pages = {
        "a plan": two_stages.to_html(),
        "slower than predicted": slower(two_stages).to_html(),
        "two runs of one plan": report_html(*two_runs),
        "two plans": report_html(Run(two_stages, name="kept"), Run(again, name="again")),
        "two models": report_html(Run(two_stages), Run(of_another_model(two_stages))),
        "alternatives": two_stages.model_copy(update={"alternatives": OTHERS}).to_html(),
        "written by hand": made.to_html(),
        "written by hand, measured": Trace(made, [step]).to_html(),
    }
    text = "\n".join(f"# {name}\n{text_of(html)}" for name, html in pages.items())
    check_golden(text, Path(__file__).parent / "golden" / "report.txt")


def test_the_page_needs_no_network(two_stages: Plan):
    html = two_stages.to_html()
    assert not re.findall(r"(?:src|href)=\"(?!#|data:,)", html)
    assert "http" not in html.replace("http-equiv", "")


def test_names_stay_text(two_stages: Plan):
    name = "</script><img src=x onerror=alert(1)>"
    document = json.loads(two_stages.model_dump_json().replace("virtual:0", name))
    html = Plan.model_validate(document).to_html()
    assert name not in html
    assert "<img" not in html
    assert "&lt;/script&gt;&lt;img" in html


def test_a_step_of_many_actions_is_drawn_without_a_box_for_each():
    profile = profile_of([Layer(1, 1, 1)] * 8, [512])
    made = plan(profile, Cluster.virtual(8), schedule="1f1b", micro_batches=512, stages=8, seconds=1)
    html = made.to_html()
    assert len(html) < 500_000
    assert html.count('class="row"') == 8
    assert html.count("M0 0H") == 1
    assert "ui.perfetto.dev" in html


def test_steps_of_two_plans_stand_on_one_axis(two_stages: Plan, again: Plan):
    html = report_html(Run(two_stages, name="kept"), Run(again, name="again"))
    ends = [float(each) for each in re.findall(r'class="idle" width="([0-9.]+)%"', html)]
    own, other = two_stages.predicted.step_seconds, again.predicted.step_seconds
    assert ends[::2] == pytest.approx([100 * own / max(own, other), 100 * other / max(own, other)], abs=1e-3)


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
