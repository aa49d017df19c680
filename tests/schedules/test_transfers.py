"""The transfers of a timeline, and the waits that they cause."""

import json

import pytest

from schedules import (
    Action,
    Kind,
    ScheduleError,
    StageCosts,
    Timeline,
    Transfer,
    build,
    replicate,
    side_by_side,
    simulate,
)


def equal(stages, **more):
    return StageCosts([1.0] * stages, [1.0] * stages, [1.0] * stages, **more)


def test_a_simulated_message_is_on_its_way_for_latency_and_bytes():
    costs = equal(2, latency=0.5, bandwidth=8.0, message_bytes=[2.0, 0.0])
    assert list(simulate(build("1f1b", 2, 1), costs).transfers) == [
        Transfer(Kind.F, 0, 1, 0, 1.0, 1.75, 2.0),
        Transfer(Kind.B, 1, 0, 0, 4.75, 5.5, 2.0),
    ]


def test_a_message_that_waits_for_its_link_leaves_when_that_is_free():
    costs = StageCosts([1, 0], [1, 1], [1, 1], bandwidth=1.0, message_bytes=[3.0, 0.0])
    sent = [(t.start, t.end) for t in simulate(build("gpipe", 2, 2), costs, contention=True).transfers]
    assert sent[:2] == [(1.0, 4.0), (4.0, 7.0)]


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
    schedule = build("gpipe", 1, 1)
    idle = Timeline(schedule, [[0.0, 3.0]], [[2.0, 4.0]]).idle[0]
    assert (idle.producer, idle.transfer, idle.delay) == (0.0, 0.0, 1.0)


def test_measured_and_predicted_share_one_trace():
    costs = equal(2, latency=0.5)
    measured, predicted = late(3.0, 7.0), simulate(build("1f1b", 2, 1), costs)
    trace = json.loads(json.dumps(side_by_side({"measured": measured, "predicted": predicted})))
    events = trace["traceEvents"]
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        0: "measured",
        1: "predicted",
    }
    lines = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    slices = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X"}
    assert lines[slices[1, "1F₀"]["tid"]] == "device 1 (stage 1)"
    assert (slices[0, "1F₀"]["ts"], slices[1, "1F₀"]["ts"]) == (7e6, 1.5e6)
    begins = [(e["cat"], e["id"]) for e in events if e["ph"] in "sb"]
    assert len(set(begins)) == len(begins) == 8  # two arrows and two messages each
    read = Timeline.from_trace(trace)
    assert (read.transfers, read.span(Action.parse("1F0"))) == (measured.transfers, (7.0, 9.0))


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
    twice = replicate(build("gpipe", devices=3, micro_batches=2), 2)
    timeline = simulate(twice, costs)
    pairs = {(one.source, one.target) for one in timeline.transfers}
    assert pairs == {(0, 2), (2, 0), (3, 5), (5, 3)}
    single = build("gpipe", devices=3, micro_batches=2)
    free, one_at_a_time = (simulate(single, costs, contention=flag).makespan for flag in (False, True))
    assert one_at_a_time > free


@pytest.mark.parametrize("skip", [(0, 1, 1.0), (2, 0, 1.0), (0, 4, 1.0), (0, 2, -1.0)])
def test_a_message_past_no_stage_is_refused(skip):
    ones = [1.0] * 4
    with pytest.raises(ScheduleError, match="goes past a stage"):
        StageCosts(ones, ones, ones, skips=[skip])
