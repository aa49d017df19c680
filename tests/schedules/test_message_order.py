"""The order of messages: one for all ranks, in which every message comes after those that it depends on."""

import random

import pytest

from schedules import (
    Action,
    Kind,
    Message,
    Schedule,
    ScheduleError,
    StageCosts,
    build,
    check,
    connection_rounds,
    insert_messages,
    insert_optimizer_step,
    insert_recompute,
    insert_reduce_grad,
    message_order,
    names,
    replicate,
    search,
)
from tests.support.searched import random_order, random_placement


def of_rank(order, rank):
    return [message.end(rank) for message in order if rank in message.ranks]


def drawn(seed):
    """Any placement on 2 to 5 devices, micro-batches in any order, some backwards split."""
    choose = random.Random(seed)
    devices = choose.randint(2, 5)
    homes = random_placement(choose, choose.randint(devices, 3 * devices), devices)
    return random_order(choose, homes, choose.randint(2, 6), in_turn=False)


def test_each_rank_sends_and_receives_in_the_one_order():
    order = message_order(build("1f1b", devices=3, micro_batches=2))
    assert of_rank(order, 0) == ["0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1"]
    assert of_rank(order, 1) == [
        "1RECV_F0", "1RECV_F1", "1SEND_F0", "1SEND_F1", "1RECV_B0", "1SEND_B0", "1RECV_B1", "1SEND_B1",
    ]  # fmt: skip
    assert of_rank(order, 2) == ["2RECV_F0", "2RECV_F1", "2SEND_B0", "2SEND_B1"]
    assert order[0] == Message(Kind.F, stages=(0, 1), ranks=(0, 1), micro_batch=0)


def test_values_that_go_past_stages_go_straight_after_the_output_and_their_gradients_back():
    order = message_order(build("1f1b", 4, 1), skips=[(0, 3), (0, 2)])
    assert of_rank(order, 0) == [
        "0SEND_F0", "0SEND_F0 to stage 2", "0SEND_F0 to stage 3",
        "0RECV_B0 from stage 3", "0RECV_B0 from stage 2", "0RECV_B0",
    ]  # fmt: skip
    assert of_rank(order, 3) == [
        "3RECV_F0 from stage 0",
        "3RECV_F0",
        "3SEND_B0",
        "3SEND_B0 to stage 0",
    ]


def test_gradients_of_shared_parameters_go_to_the_previous_user_after_those_of_the_input():
    order = message_order(build("zb-h1", 2, 1), shared=[(1, 0), (1, 0)])
    assert of_rank(order, 1) == [
        "1RECV_F0",
        "1SEND_B0",
        "1SEND_W0 of shared parameter 0 to stage 0",
        "1SEND_W0 of shared parameter 1 to stage 0",
    ]
    assert [message.number for message in order] == [0, 0, 0, 1]


def test_stages_of_one_device_or_rank_send_each_other_nothing():
    wave = build("zb-v", devices=2, micro_batches=1)  # stages 1 and 2 are neighbours on device 1
    assert {message.stages for message in message_order(wave, skips=[(0, 3)])} == {
        (0, 1), (1, 0), (2, 3), (3, 2),
    }  # fmt: skip
    looped = build("interleaved-1f1b", devices=4, micro_batches=4)
    order = message_order(looped, shared=[(7, 0), (5, 0)], rank_of=(0, 0, 1, 1))
    assert {(message.stages, message.ranks) for message in order if message.kind is Kind.F} == {
        ((1, 2), (0, 1)), ((3, 4), (1, 0)), ((5, 6), (0, 1)),
    }  # fmt: skip
    assert {message.stages for message in order if message.kind is Kind.W} == {(7, 0)}
    assert message_order(looped, rank_of=(0, 0, 0, 0)) == ()


def test_replicas_reduce_together_after_the_messages_that_come_before_on_any_of_them():
    schedule = replicate(insert_reduce_grad(build("1f1b", 2, 2)), replicas=2)
    order = message_order(schedule)
    assert order[-1] == Message(Kind.REDUCE_GRAD, stages=(0, 2), ranks=(0, 2), micro_batch=None)
    assert of_rank(order, 3)[-2:] == ["3SEND_B3", "1REDUCE_GRAD"]
    assert {message.stages for message in order if message.kind is Kind.F} == {(0, 1), (2, 3)}
    in_one_rank = message_order(schedule, rank_of=(0, 1, 0, 1))
    assert not [message for message in in_one_rank if message.kind is Kind.REDUCE_GRAD]


def test_devices_that_would_reduce_in_different_orders_are_refused():
    crossed = Schedule.from_csv(
        "0F0,0B0,3F1,3B1,0REDUCE_GRAD,3REDUCE_GRAD\n2F1,1F0,1B0,2B1,1REDUCE_GRAD,2REDUCE_GRAD\n", replicas=2
    )
    with pytest.raises(
        ScheduleError,
        match="device 0 at 0REDUCE_GRAD for 2REDUCE_GRAD; device 1 at 1REDUCE_GRAD for 3REDUCE_GRAD",
    ):
        message_order(crossed)
    check(crossed)  # within a process gradients are sent and summed
    with pytest.raises(ScheduleError, match="deadlock: device 0 at 0REDUCE_GRAD"):
        check(crossed, rendezvous=True)


@pytest.mark.parametrize("name", names())
def test_what_does_not_send_changes_no_order(name):
    schedule = build(name, 4, 8)
    order = message_order(schedule)
    assert message_order(insert_messages(schedule)) == order
    with_more = insert_recompute(schedule)
    with_more = with_more if with_more.versions else insert_optimizer_step(with_more)
    assert sorted(map(str, message_order(with_more))) == sorted(map(str, order))
    forwards = [message for message in order if message.kind is Kind.F]
    assert len(forwards) * 2 == len(order)


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_can_issue_what_it_needs_and_what_it_has_made_without_waiting(seed):
    schedule = drawn(seed)
    last = schedule.stages - 1
    order = message_order(schedule, skips=[(0, last)] * (last > 1), shared=[(last, 0)])
    for device, row in enumerate(schedule.actions):
        own = [message for message in order if device in message.ranks]
        made, issued = set(), 0
        for action in row:
            needed = [at for at, message in enumerate(own) if reads(action, message)]
            assert sends(own[issued : max(needed, default=-1) + 1], device) <= made
            issued = max(issued, *(at + 1 for at in needed), 0)
            made |= {message for message in own if makes(action, message)}
            ready = [at for at, message in enumerate(own) if message in made]
            assert sends(own[issued : max(ready, default=-1) + 1], device) <= made
            issued = max(issued, *(at + 1 for at in ready), 0)
        assert issued == len(own)


def sends(messages, rank):
    return {message for message in messages if message.ranks[0] == rank}


def makes(action, message):
    return is_of(action, message) and message.stages[0] == action.stage


def reads(action, message):
    return is_of(action, message) and message.stages[1] == action.stage


def is_of(action, message):
    """Whether the action and the message belong to one direction of one micro-batch."""
    kinds = (Kind.F,) if message.kind is Kind.F else (Kind.B, Kind.I)
    return action.kind in kinds and action.micro_batch == message.micro_batch


def test_a_searched_schedule_has_an_order_too():
    costs = StageCosts([1, 2, 1, 3], [1, 1, 1, 1], [1, 2, 1, 1], stash_bytes=[1] * 4)
    found = search(costs, devices=2, micro_batches=4, memory=[4, 4])
    check(found, rendezvous=True, skips=[(0, 2)], shared=[(3, 0)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skips": [(0, 1)]}, r"skips has \(0, 1\): a message goes past a stage at least, to one of the 3"),
        ({"skips": [(0, 3)]}, r"skips has \(0, 3\)"),
        ({"shared": [(0, 2)]}, r"shared has \(0, 2\): gradients go from a stage to an earlier one of the 3"),
        ({"rank_of": (0, 1)}, r"rank_of must name a rank from 0 for each of 3 devices, got \[0, 1\]"),
        ({"rank_of": (0, 1, -1)}, "rank_of must name a rank"),
    ],
)
def test_impossible_ends_are_refused(arguments, message):
    schedule = build("1f1b", 3, 2)
    with pytest.raises(ScheduleError, match=message):
        message_order(schedule, **arguments)
    with pytest.raises(ScheduleError, match=message):
        check(schedule, **arguments)


def all_pairs(ranks):
    return [(a, b) for a in range(ranks) for b in range(ranks) if a != b]


def line(ranks):
    return [edge for a in range(ranks - 1) for edge in ((a, a + 1), (a + 1, a))]


@pytest.mark.parametrize(
    ("edges", "rounds"),
    [
        ([], 0),
        ([(0, 1)], 1),
        (line(2), 2),
        (line(8), 4),
        ([*line(8), (7, 0), (0, 7)], 4),
        ([*line(5), (4, 0), (0, 4)], 6),
        (all_pairs(4), 6),
        (all_pairs(8), 14),
    ],
)
def test_edges_connect_in_disjoint_rounds(edges, rounds):
    found = connection_rounds(reversed(edges))
    assert len(found) == rounds
    assert sorted(edge for part in found for edge in part) == sorted(edges)
    for part in found:
        ends = [rank for edge in part for rank in edge]
        assert len(ends) == len(set(ends))


def test_no_rank_connects_to_itself():
    with pytest.raises(ValueError, match=r"edge \(1, 1\) leads from a rank to itself"):
        connection_rounds([(0, 1), (1, 1)])


def test_an_action_has_its_messages_beside_it():
    overlapped = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n")
    assert [str(action) for action in insert_messages(overlapped).actions[1]] == [
        "1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1",
    ]  # fmt: skip
    assert Action(Kind.RECV_B, 0, 0) in insert_messages(overlapped).actions[0]
