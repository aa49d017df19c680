"""Every written form of a schedule reads back as the same schedule."""

import json

import pytest

from schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    StageCosts,
    build,
    insert_reduce_grad,
    simulate,
)


def test_an_action_prints_as_it_was_parsed():
    for text in (
        "0F0",
        "12I31",
        "1W3",
        "0B1",
        "0REDUCE_GRAD",
        "2OPT_STEP",
        "2OPT_STEP5",
    ):
        assert str(Action.parse(text)) == text
    pair = Action.overlap(Action(Kind.F, 0, 1), Action(Kind.B, 3, 2))
    assert Action.parse("(0F1;3B2)OVERLAP_F_B") == pair
    assert str(pair) == "(0F1;3B2)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text",
    [
        *("2F0garbage", " 2F0", "2F0 ", "2F", "F0", "2X0", "02F0", "2F00", "-1F0", "", "2f0", "٣F0"),
        *("0REDUCE_GRAD3", "(0F1)OVERLAP_F_B", "(0F1;3B2)OVERLAP_F_B0", "(0F1;3B2;1F1)OVERLAP_F_B"),
    ],
)
def test_text_that_is_not_exactly_one_action_is_refused(text):
    with pytest.raises(ScheduleError, match=r"no action|no micro-batch|reduced once"):
        Action.parse(text)


def test_csv_skips_empty_cells_and_lines():
    assert Schedule.from_csv("0F0,,0B0\n,1F0,1B0\n\n , \n").actions == build("1f1b", 2, 1).actions


def test_csv_refuses_a_stage_on_two_devices():
    with pytest.raises(ScheduleError, match="0B0 stands on device 1, but stage 0 is on device 0"):
        Schedule.from_csv("0F0\n0B0\n")


def test_csv_names_the_device_of_a_bad_cell():
    with pytest.raises(ScheduleError, match="device 1: '1F0x' is no action"):
        Schedule.from_csv("0F0,0B0\n1F0x,1B0\n")


def test_a_chrome_trace_has_real_times_arrows_and_a_counter():
    timeline = simulate(build("1f1b", 2, 2), StageCosts([1, 2], [1, 2], [1, 2], latency=0.5))
    events = timeline.to_trace()["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (slices["1F₀"]["ts"], slices["1F₀"]["dur"]) == (1.5e6, 2e6)
    assert slices["1F₀"]["tid"] == slices["1B₁"]["tid"] != slices["0F₀"]["tid"]
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == 4
    counts = [e["args"]["micro-batches"] for e in events if e["name"] == "in flight, device 0"]
    assert counts == [1, 2, 1, 0]


def test_csv_skips_the_cells_of_torch_for_messages_and_sharded_weights():
    """The table of torch's 1F1B with its compute_comms: weights are gathered first and freed last."""
    text = (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RESHARD,1REDUCE_GRAD\n"
    )
    assert Schedule.from_csv(text).actions == insert_reduce_grad(build("1f1b", 2, 2)).actions


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("micro_batches", 2.5, "micro_batches"),
        ("device_of", [0, True], "device_of.1"),
        ("replicas", 0, "replicas"),
        ("version", 2, "version"),
        ("surprise", 1, "surprise"),
    ],
)
def test_json_refuses_fields_of_other_types(field, value, says):
    fields = json.loads(build("1f1b", 2, 2).to_json()) | {field: value}
    with pytest.raises(ScheduleError, match=says):
        Schedule.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_json_that_holds_no_schedule_is_refused(text):
    with pytest.raises(ScheduleError, match="not a schedule as"):
        Schedule.from_json(text)
