"""What passes write, and what texts are read as; that legal schedules stay legal is a law of all of them."""

import pytest

from schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    StageCosts,
    build,
    check,
    fuse_backward,
    insert_optimizer_step,
    insert_recompute,
    insert_reduce_grad,
    replicate,
    simulate,
    split_backward,
    split_overlaps,
)

OVERLAPPED = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
# The table of torch's 1F1B with its compute_comms: weights are gathered first and freed last.
OF_TORCH = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RESHARD,1REDUCE_GRAD\n"
)

# A schedule, and its rows.
WRITTEN: dict[str, tuple[Schedule, list[str]]] = {
    "split backwards": (
        split_backward(build("1f1b", 2, 2)),
        ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"],
    ),
    "fused backwards": (
        fuse_backward(build("zb-h1", 2, 3)),
        ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
    ),
    "pairs come apart": (split_overlaps(OVERLAPPED), ["0F0 0F1 0B0 0B1"]),
    "pairs come apart and are split": (split_backward(OVERLAPPED), ["0F0 0F1 0I0 0W0 0I1 0W1"]),
    "recompute of some stages only": (
        insert_recompute(build("1f1b", 2, 1), [0]),
        ["0F0 0RECOMPUTE0 0B0", "1F0 1B0"],
    ),
    "gradients are reduced after the last backward of each stage": (
        insert_reduce_grad(build("zb-v", 1, 1)),
        ["0F0 1F0 1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD"],
    ),
    "an optimizer step a stage": (
        insert_optimizer_step(build("1f1b", 2, 1)),
        ["0F0 0B0 0OPT_STEP", "1F0 1B0 1OPT_STEP"],
    ),
    "a copy without micro-batches only reduces": (
        replicate(build("1f1b", 1, 1), 2, 1),
        ["0F0 0B0 0REDUCE_GRAD", "1REDUCE_GRAD"],
    ),
    "micro-batches are dealt out in turn": (
        replicate(build("gpipe", 1, 2), 2, 3),
        ["0F0 0F2 0B0 0B2 0REDUCE_GRAD", "1F1 1B1 1REDUCE_GRAD"],
    ),
    "reductions that are there stay where they are": (
        replicate(insert_reduce_grad(build("zb-v", 1, 1)), 2),
        [
            "0F0 1F0 1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD",
            "2F1 3F1 3I1 3W1 3REDUCE_GRAD 2I1 2W1 2REDUCE_GRAD",
        ],
    ),
    "empty cells and lines": (Schedule.from_csv("0F0,,0B0\n,1F0,1B0\n\n , \n"), ["0F0 0B0", "1F0 1B0"]),
    "cells of torch for messages and sharded weights": (
        Schedule.from_csv(OF_TORCH),
        ["0F0 0F1 0B0 0B1 0REDUCE_GRAD", "1F0 1B0 1F1 1B1 1REDUCE_GRAD"],
    ),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_written(case):
    schedule, expected = WRITTEN[case]
    assert [" ".join(map(str, row)) for row in schedule.actions] == expected


def test_fused_is_what_was_split():
    assert fuse_backward(split_backward(build("1f1b", 2, 2))) == build("1f1b", 2, 2)


def test_copies_of_a_model_wait_for_each_other_before_they_reduce():
    reduced = insert_reduce_grad(build("chimera", 2, 2))
    assert [[str(action) for action in row[-2:]] for row in reduced.actions] == [
        ["0REDUCE_GRAD", "3REDUCE_GRAD"],
        ["2REDUCE_GRAD", "1REDUCE_GRAD"],
    ]
    timeline = simulate(reduced, StageCosts([1, 4], [1, 4], [1, 4], reduce_grad=[2, 3]))
    first, second = (timeline.span(reduced.actions[device][-2])[0] for device in range(2))
    assert first == second


def test_copies_of_copies_are_copies():
    assert replicate(build("1f1b", 2, 4), 1) == build("1f1b", 2, 4)
    assert replicate(replicate(build("gpipe", 2, 2), 2), 2).replicas == 4
    whole = replicate(build("chimera", 2, 2), 2)
    check(whole)
    assert (whole.replicas, whole.device_of) == (4, (0, 1, 1, 0, 2, 3, 3, 2))


def test_an_action_prints_as_it_was_parsed():
    pair = Action.overlap(Action(Kind.F, 0, 1), Action(Kind.B, 3, 2))
    assert Action.parse("(0F1;3B2)OVERLAP_F_B") == pair
    for text in ("0F0", "12I31", "1W3", "0B1", "0REDUCE_GRAD", "2OPT_STEP", "2OPT_STEP5", str(pair)):
        assert str(Action.parse(text)) == text


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
