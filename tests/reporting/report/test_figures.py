"""The figures of the report: waits of a timeline, parts of a memory, ticks of an axis."""

from __future__ import annotations

import pytest

from pipepart import Cluster, Plan, Profile, Trace, plan
from pipepart.reporting.report import Run
from pipepart.reporting.report.memory import memory_section
from pipepart.reporting.report.timelines import timelines_section
from schedules import StageCosts, build, simulate
from schedules.analysis.waits import waits

PLANS = {
    "1f1b": {"cluster": Cluster.virtual(2)},
    "gpipe": {"cluster": Cluster.virtual(2), "recompute": "always"},
    "interleaved-1f1b": {"cluster": Cluster.virtual(2), "chunks": 2},
    "zb-v": {"cluster": Cluster.virtual(2)},
    "pipedream": {"cluster": Cluster.virtual(2)},
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_the_waits_of_a_device_sum_up_to_its_idle_time(schedule: str):
    chunks = 2 if schedule.startswith("interleaved") else 1
    stages = 3 * chunks
    costs = StageCosts(
        [1, 2, 1] * chunks, [1, 2, 1] * chunks, [1, 2, 1] * chunks, latency=0.25, stash_bytes=[1] * stages
    )
    timeline = simulate(build(schedule, devices=3, micro_batches=6), costs)
    for row, idle in zip(waits(timeline), timeline.idle, strict=True):
        assert sum(wait.producer for wait in row) == pytest.approx(idle.producer)
        assert sum(wait.transfer for wait in row) == pytest.approx(idle.transfer)
        assert sum(wait.delay for wait in row) == pytest.approx(idle.delay)


def test_a_wait_names_the_action_of_the_other_device():
    timeline = simulate(
        build("1f1b", devices=2, micro_batches=2), StageCosts([1, 1], [1, 1], [1, 1], latency=0.5)
    )
    first, *_ = waits(timeline)[1]
    assert (first.begin, first.producer, first.transfer, first.delay, str(first.source)) == (
        0,
        1,
        0.5,
        0,
        "0F0",
    )


@pytest.mark.parametrize("schedule", PLANS)
def test_the_parts_of_a_memory_sum_up_to_the_predicted_peak(doubled: Profile, schedule: str):
    check_memory(plan(doubled, schedule=schedule, micro_batches=4, **PLANS[schedule]))  # type: ignore[arg-type]


def test_the_parts_of_a_memory_count_replicas_and_offloaded_stashes(doubled: Profile):
    check_memory(plan(doubled, Cluster.virtual(4), schedule="1f1b", micro_batches=4, replicas=2))
    host = Cluster.parse(["64MiB"] * 2, host_link="25GB/s")
    check_memory(plan(doubled, host, schedule="1f1b", micro_batches=4, offload="stash"))


def check_memory(made: Plan) -> None:
    (memory,) = memory_section([Run(made)]) or []
    needs = made.device_bytes()
    largest = max(needs.values())
    widths = {name: sum(piece.percent for piece in pieces) for name, pieces, _ in memory.bars.rows}
    assert set(widths) == set(needs)
    assert all(piece.percent > 0 for _, pieces, _ in memory.bars.rows for piece in pieces)
    for name, width in widths.items():
        assert width / max(widths.values()) == pytest.approx(needs[name] / largest, abs=0.005)


def test_boxes_lie_on_the_axis_of_the_longest_step(two_stages: Plan):
    timelines = timelines_section([Run(two_stages, Trace(two_stages, [two_stages.simulate()]))])
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
