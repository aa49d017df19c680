"""Timelines, simulated and measured: their figures, what devices wait for, transfers, drawings, pictures and traces."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

import schedules
from schedules import Action, Kind, Schedule, StageCosts, Timeline, Transfer, build, replicate, simulate
from tests.support.golden import check_golden
from tests.support.trace_format import check_trace_format


def equal(stages, **more):
    return StageCosts([1.0] * stages, [1.0] * stages, [1.0] * stages, **more)


def test_a_measured_timeline_needs_no_costs():
    """Two devices; the second is 1 s late with its forward, and the times start at 100 s."""
    schedule = build("1f1b", 2, 1)
    timeline = Timeline(schedule, [[100.0, 107.0], [103.0, 105.0]], [[102.0, 109.0], [105.0, 106.0]])
    assert timeline.makespan == timeline.zero_bubble_seconds == 9.0
    assert timeline.busy == (4.0, 3.0)
    assert timeline.bubble == pytest.approx(1 - 7 / 18)
    first, second = timeline.idle
    assert (first.producer, first.transfer, first.finished) == (4.0, 1.0, 0.0)
    assert (second.producer, second.transfer, second.finished) == (2.0, 1.0, 3.0)


def test_the_drawing_is_to_scale_with_one_line_per_device():
    drawn = simulate(build("1f1b", 4, 8), equal(4)).draw(width=36).splitlines()
    assert drawn == [
        "0 |0123......0b41b52b63b74b.5b.6b.7b",
        "1 |.012....0b31b42b53b64b75b.6b.7b..",
        "2 |..01..0b21b32b43b54b65b76b.7b....",
        "3 |...00b11b22b33b44b55b66b77b......",
    ]


def test_a_long_timeline_goes_on_below():
    panels = simulate(build("1f1b", 8, 32), equal(8)).draw(width=100).split("\n\n")
    assert len(panels) == 3
    assert all(len(panel.splitlines()) == 8 for panel in panels)
    assert all(len(line) <= 100 for panel in panels for line in panel.splitlines())


def test_a_simulated_message_is_on_its_way_for_latency_and_bytes():
    costs = equal(2, latency=0.5, bandwidth=8.0, message_bytes=[2.0, 0.0])
    assert list(simulate(build("1f1b", 2, 1), costs).transfers) == [
        Transfer(Kind.F, 0, 1, 0, 1.0, 1.75, 2.0),
        Transfer(Kind.B, 1, 0, 0, 4.75, 5.5, 2.0),
    ]


def late(arrived, started):
    """One micro-batch; device 1 is idle from 0 to `started`, its input is made at 2 and arrives at `arrived`."""
    return Timeline(
        build("1f1b", 2, 1),
        [[0.0, 12.0], [started, 9.0]],
        [[2.0, 13.0], [9.0, 11.0]],
        transfers=(Transfer(Kind.F, 0, 1, 0, 2.0, arrived, 8), Transfer(Kind.B, 1, 0, 0, 11.0, 11.0, 8)),
    )


@pytest.mark.parametrize(
    ("arrived", "started", "causes"),
    [(3.0, 7.0, (2.0, 1.0, 4.0)), (2.0, 2.5, (2.0, 0.0, 0.5)), (6.0, 6.0, (2.0, 4.0, 0.0))],
)
def test_waiting_ends_when_the_message_is_there(arrived, started, causes):
    idle = late(arrived, started).idle[1]
    assert (idle.producer, idle.transfer, idle.delay) == causes
    assert sum(causes) + idle.finished == pytest.approx(idle.total)


def test_nothing_is_awaited_between_two_actions_of_one_device():
    idle = Timeline(build("gpipe", 1, 1), [[0.0, 3.0]], [[2.0, 4.0]]).idle[0]
    assert (idle.producer, idle.transfer, idle.delay) == (0.0, 0.0, 1.0)


def test_measured_and_predicted_share_one_trace():
    measured, predicted = late(3.0, 7.0), simulate(build("1f1b", 2, 1), equal(2, latency=0.5))
    trace = json.loads(json.dumps(schedules.side_by_side({"measured": measured, "predicted": predicted})))
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "measured", 1: "predicted"}
    lines = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    slices = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X"}
    assert lines[slices[1, "1F₀"]["tid"]] == "device 1 (stage 1)"
    assert (slices[0, "1F₀"]["ts"], slices[1, "1F₀"]["ts"], slices[1, "1F₀"]["dur"]) == (7e6, 1.5e6, 1e6)
    counts = [e["args"]["micro-batches"] for e in events if e["name"] == "in flight, device 0" and e["pid"]]
    assert counts == [1, 0]
    begins = [(e["cat"], e["id"]) for e in events if e["ph"] in "sb"]
    assert len(set(begins)) == len(begins) == 8  # two arrows and two messages each
    read = Timeline.from_trace(trace)
    assert (read.transfers, read.span(Action.parse("1F0"))) == (measured.transfers, (7.0, 9.0))


@pytest.mark.parametrize("change", [schedules.insert_recompute, schedules.insert_offload])
def test_the_stash_of_each_device_in_a_trace_ends_with_nothing_and_has_its_peak(change) -> None:
    schedule = change(build("1f1b", 3, 6))
    stash, inputs = [2.0**20, 2.0**21, 2.0**22], [2.0**18] * 3
    costs = equal(3, latency=0.003, stash_bytes=stash, boundary_bytes=inputs, offload=[0.01] * 3)
    timeline = simulate(schedule, costs)
    trace = timeline.to_trace(["a", "b", "c"], costs)
    check_trace_format(trace)
    for device, label in enumerate("abc"):
        stashes = [event["args"] for event in trace["traceEvents"] if event["name"] == f"stash, {label}"]
        levels = [each["MiB"] for each in stashes]
        assert levels[-1] == 0
        assert max(levels) == pytest.approx(timeline.peak_bytes[device] / 2**20)


def test_a_micro_batch_has_one_colour_on_all_devices() -> None:
    events = simulate(build("zb-h1", 4, 12), equal(4, latency=0.003)).to_trace()["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    digits = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
    numbers = [int(re.findall(r"[₀-₉]+$", event["name"])[0].translate(digits)) for event in slices]
    # ui/src/components/colorizer.ts of Perfetto: the colour is that of the name without its digits.
    of_perfetto = {
        (event["cat"], number, re.sub(r"( )?[0-9]+", "", event["name"]))
        for number, event in zip(numbers, slices, strict=True)
    }
    assert len(of_perfetto) == len({name for *_, name in of_perfetto}) == 3 * 12


def test_slices_of_a_trace_do_not_overlap_by_rounding() -> None:
    costs = StageCosts([1.23456789e-6] * 2, [2.3456789e-6] * 2, [3.456789e-6] * 2)
    events = simulate(build("zb-h1", 2, 40), costs).to_trace()["traceEvents"]
    slices = sorted((e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X")
    assert all(one[2] <= other[1] + 1e-9 for one, other in pairwise(slices) if one[0] == other[0])


def test_a_message_past_stages_is_waited_for_where_it_is_late():
    def costs(size):
        ones = [1.0] * 4
        return StageCosts(ones, ones, [0.0] * 4, bandwidth=10.0, skips=[(0, 3, size)])

    schedule = build("gpipe", devices=4, micro_batches=1)
    assert simulate(schedule, costs(0.0)).makespan == 8.0
    assert simulate(schedule, costs(20.0)).makespan == 8.0  # 2 s, in which two stages compute
    late = simulate(schedule, costs(50.0))
    assert late.makespan == 8.0 + 3.0 + 3.0  # 5 s each way
    (there, back) = (one for one in late.transfers if abs(one.source - one.target) > 1)
    assert (there.source, there.target, there.start, there.end, there.bytes) == (0, 3, 1.0, 6.0, 50.0)
    assert (back.source, back.target, back.start, back.end) == (3, 0, 8.0, 13.0)


def test_messages_past_stages_of_every_copy_and_with_one_message_at_a_time():
    ones = [1.0] * 3
    costs = StageCosts(ones, ones, [0.0] * 3, bandwidth=10.0, skips=[(0, 2, 40.0)])
    single = build("gpipe", devices=3, micro_batches=2)
    timeline = simulate(replicate(single, 2), costs)
    pairs = {(one.source, one.target) for one in timeline.transfers}
    assert pairs == {(0, 2), (2, 0), (3, 5), (5, 3)}
    free, one_at_a_time = (simulate(single, costs, contention=flag).makespan for flag in (False, True))
    assert one_at_a_time > free


@pytest.mark.parametrize(("name", "chunks", "seconds"), [("interleaved-1f1b", 3, 1.0), ("zb-v", 2, 0.001)])
def test_pictures_are_as_the_files_have_them(name: str, chunks: int, seconds: float, tmp_path: Path) -> None:
    """Boxes to scale, of the colour of their kind and chunk, on the row of their device; names are escaped."""
    schedule = build(name, 2, 2, chunks)
    each = [seconds] * schedule.stages
    timeline = simulate(schedule, StageCosts(each, each, each))
    svg = timeline.svg(tmp_path / "a.svg", width=600, labels=["cuda:0", "<b>&\x07"], title="A & B")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == svg
    check_golden(svg, Path(__file__).parent / "golden" / f"{name}.svg")


def test_a_schedule_without_actions_has_a_picture() -> None:
    assert "step of 0 s" in Timeline(Schedule("none", ((), ()), (0, 1), 0), ((), ()), ((), ())).svg()
