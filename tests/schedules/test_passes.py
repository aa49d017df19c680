"""Passes: what each adds or takes apart, and that legal schedules stay legal."""

import pytest

from schedules import (
    Schedule,
    ScheduleError,
    StageCosts,
    build,
    fuse_backward,
    insert_optimizer_step,
    insert_recompute,
    insert_reduce_grad,
    simulate,
    split_backward,
    split_overlaps,
)


def rows(schedule):
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_split_and_fused_backwards():
    schedule = build("1f1b", 2, 2)
    split = split_backward(schedule)
    assert rows(split) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    assert fuse_backward(split) == schedule
    assert rows(fuse_backward(build("zb-h1", 2, 3))) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_overlapped_pairs_come_apart():
    overlapped = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert rows(split_overlaps(overlapped)) == ["0F0 0F1 0B0 0B1"]
    assert rows(split_backward(overlapped)) == ["0F0 0F1 0I0 0W0 0I1 0W1"]


def test_recompute_of_some_stages_only():
    assert rows(insert_recompute(build("1f1b", 2, 1), [0])) == ["0F0 0RECOMPUTE0 0B0", "1F0 1B0"]
    with pytest.raises(ScheduleError, match="1f1b has no stage 5 to recompute among 2"):
        insert_recompute(build("1f1b", 2, 1), [5])


def test_gradients_are_reduced_after_the_last_backward_of_each_stage():
    assert rows(insert_reduce_grad(build("zb-v", 1, 1))) == [
        "0F0 1F0 1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD"
    ]


def test_copies_of_a_model_wait_for_each_other_before_they_reduce():
    reduced = insert_reduce_grad(build("chimera", 2, 2))
    assert [row.split()[-2:] for row in rows(reduced)] == [
        ["0REDUCE_GRAD", "3REDUCE_GRAD"],
        ["2REDUCE_GRAD", "1REDUCE_GRAD"],
    ]
    timeline = simulate(reduced, StageCosts([1, 4], [1, 4], [1, 4], reduce_grad=[2, 3]))
    first, second = (timeline.span(reduced.actions[device][-2])[0] for device in range(2))
    assert first == second


def test_one_optimizer_step_a_stage_ends_a_synchronous_schedule():
    assert rows(insert_optimizer_step(build("1f1b", 2, 1))) == ["0F0 0B0 0OPT_STEP", "1F0 1B0 1OPT_STEP"]
    with pytest.raises(ScheduleError, match="pipedream is asynchronous"):
        insert_optimizer_step(build("pipedream", 2, 2))
