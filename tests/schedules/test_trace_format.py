"""Traces keep to the trace-event format, whatever the schedule, and have counters of bytes."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from schedules import (
    ScheduleError,
    StageCosts,
    Timeline,
    build,
    insert_offload,
    insert_recompute,
    simulate,
)
from tests.support.trace_format import check_trace_format


def costs_of(stages: int, **more: object) -> StageCosts:
    seconds = [0.1 + 0.013 * stage for stage in range(stages)]
    stash = [2.0**20 * (stage + 1) for stage in range(stages)]
    return StageCosts(seconds, seconds, seconds, latency=0.003, stash_bytes=stash, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [insert_recompute, insert_offload])
def test_the_stash_of_each_device_begins_and_ends_with_nothing_and_has_its_peak(change) -> None:
    schedule = change(build("1f1b", 3, 6))
    costs = costs_of(3, boundary_bytes=[2.0**18] * 3, recompute=[0.1] * 3, offload=[0.01] * 3)
    timeline = simulate(schedule, costs)
    trace = timeline.to_trace(["a", "b", "c"], costs)
    check_trace_format(trace)
    for device, label in enumerate("abc"):
        levels = [
            event["args"]["MiB"] for event in trace["traceEvents"] if event["name"] == f"stash, {label}"
        ]
        assert levels[-1] == 0
        assert max(levels) == pytest.approx(timeline.peak_bytes[device] / 2**20)


def test_a_micro_batch_has_one_colour_on_all_devices() -> None:
    events = simulate(build("zb-h1", 4, 12), costs_of(4)).to_trace()["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    digits = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
    numbers = [int(re.findall(r"[₀-₉]+$", event["name"])[0].translate(digits)) for event in slices]
    # ui/src/components/colorizer.ts of Perfetto: the colour is that of the name without its digits.
    of_perfetto = {
        (event["cat"], number, re.sub(r"( )?[0-9]+", "", event["name"]))
        for number, event in zip(numbers, slices, strict=True)
    }
    assert len(of_perfetto) == len({name for *_, name in of_perfetto}) == 3 * 12


def test_slices_do_not_overlap_by_rounding() -> None:
    costs = StageCosts([1.23456789e-6] * 2, [2.3456789e-6] * 2, [3.456789e-6] * 2)
    events = simulate(build("zb-h1", 2, 40), costs).to_trace()["traceEvents"]
    slices = sorted((e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X")
    assert all(one[2] <= other[1] + 1e-9 for one, other in pairwise(slices) if one[0] == other[0])


def test_a_trace_without_some_of_its_actions_is_refused() -> None:
    trace = simulate(build("1f1b", 2, 3), costs_of(2)).to_trace()
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["name"] != "1B₂"]
    with pytest.raises(ScheduleError, match="lacks 1 of its 12 actions"):
        Timeline.from_trace(trace)
