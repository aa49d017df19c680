"""Data parallelism: copies side by side are legal, cost what one costs and the sum, and divide the micro-batches."""

import pytest

from schedules import (
    Kind,
    ScheduleError,
    StageCosts,
    build,
    check,
    insert_reduce_grad,
    replicate,
    simulate,
)


def costs_of(schedule, **more):
    stages = schedule.model_stages
    return StageCosts(
        [1 + stage % 3 for stage in range(stages)],
        [1.5] * stages,
        [0.5] * stages,
        latency=0.25,
        stash_bytes=[1 + stage for stage in range(stages)],
        **more,
    )


def micro_batches_of(schedule, row):
    return sorted({leaf.micro_batch for action in row for leaf in action.leaves if leaf.kind is Kind.F})


def test_the_sum_of_the_gradients_is_priced_once_all_copies_are_done():
    one = build("gpipe", 2, 2)
    costs = costs_of(one, reduce_grad=[5, 7])
    # Stage 0 is done last: its sum of 5 seconds ends the step, and that of stage 1 runs beside.
    before = simulate(one, costs).makespan
    assert simulate(replicate(one, 2), costs).makespan == before + 5


def test_a_slower_copy_keeps_the_others_waiting():
    whole = replicate(build("gpipe", 2, 2), 2)
    slow = StageCosts([1, 1, 3, 3], [1, 1, 3, 3], [0, 0, 0, 0], reduce_grad=[1] * 4)
    timeline = simulate(whole, slow)
    assert timeline.makespan == 3 * 6 + 1
    assert timeline.span(whole.actions[0][-1]) == (18, 19)


def test_micro_batches_are_dealt_out_in_turn():
    whole = replicate(build("1f1b", 1, 3), 3, 7)
    assert [micro_batches_of(whole, row) for row in whole.actions] == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_copy_without_micro_batches_only_reduces():
    whole = replicate(build("1f1b", 1, 1), 2, 1)
    assert [" ".join(map(str, row)) for row in whole.actions] == ["0F0 0B0 0REDUCE_GRAD", "1REDUCE_GRAD"]


def test_copies_of_copies_are_copies():
    assert replicate(build("1f1b", 2, 4), 1) == build("1f1b", 2, 4)
    assert replicate(replicate(build("gpipe", 2, 2), 2), 2).replicas == 4
    whole = replicate(build("chimera", 2, 2), 2)
    check(whole)
    assert whole.replicas == 4
    assert whole.device_of == (0, 1, 1, 0, 2, 3, 3, 2)


def test_reductions_that_are_there_stay_where_they_are():
    whole = replicate(insert_reduce_grad(build("zb-v", 1, 1)), 2)
    check(whole)
    row = "{}F{m} {}F{m} {}I{m} {}W{m} {}REDUCE_GRAD {}I{m} {}W{m} {}REDUCE_GRAD"
    assert [" ".join(map(str, actions)) for actions in whole.actions] == [
        row.format(0, 1, 1, 1, 1, 0, 0, 0, m=0),
        row.format(2, 3, 3, 3, 3, 2, 2, 2, m=1),
    ]


@pytest.mark.parametrize(
    ("name", "copies", "micro_batches", "reason"),
    [
        ("1f1b", 0, None, "at least 1, got replicas=0"),
        ("1f1b", True, None, "at least 1, got replicas=True"),
        ("1f1b", 2, 9, "2 replicas of 1f1b with 4 micro-batches run 1 to 8, got micro_batches=9"),
        ("1f1b", 2, 0, "got micro_batches=0"),
        ("pipedream", 2, None, "pipedream is asynchronous"),
    ],
)
def test_what_has_no_copies_is_refused(name, copies, micro_batches, reason):
    with pytest.raises(ScheduleError, match=reason):
        replicate(build(name, 2, 4), copies, micro_batches)
