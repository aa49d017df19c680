"""Messages: one order for all ranks, in which no rank waits before it issues, and deadlocks where it is not kept."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import networkx as nx
import pytest

from schedules import (
    Action,
    Kind,
    Message,
    Schedule,
    ScheduleError,
    build,
    check,
    connection_rounds,
    insert_messages,
    insert_reduce_grad,
    message_order,
    names,
    replicate,
)
from tests.support.searched import random_order, random_placement

QUEUES = ("rank", "pair", "edge")
SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)
NEEDED = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B, Kind.B: Kind.RECV_B}


def drawn(seed: int) -> Schedule:
    """Any placement on 2 to 5 devices, micro-batches in any order, some backwards split."""
    choose = random.Random(seed)
    devices = choose.randint(2, 5)
    homes = random_placement(choose, choose.randint(devices, 3 * devices), devices)
    return random_order(choose, homes, choose.randint(2, 6), in_turn=False)


def of_rank(order, rank):
    return [message.end(rank) for message in order if rank in message.ranks]


def test_each_rank_sends_and_receives_in_the_one_order():
    order = message_order(build("1f1b", devices=3, micro_batches=2))
    assert of_rank(order, 1) == [
        "1RECV_F0", "1RECV_F1", "1SEND_F0", "1SEND_F1", "1RECV_B0", "1SEND_B0", "1RECV_B1", "1SEND_B1",
    ]  # fmt: skip
    assert order[0] == Message(Kind.F, stages=(0, 1), ranks=(0, 1), micro_batch=0)


def test_values_go_past_stages_after_the_output_and_shared_gradients_after_that_of_the_input():
    order = message_order(build("zb-h1", 4, 1), skips=[(0, 3), (0, 2)], shared=[(3, 0), (3, 0)])
    assert of_rank(order, 0) == [
        "0SEND_F0", "0SEND_F0 to stage 2", "0SEND_F0 to stage 3",
        "0RECV_B0 from stage 3", "0RECV_W0 of shared parameter 0 from stage 3",
        "0RECV_W0 of shared parameter 1 from stage 3", "0RECV_B0 from stage 2", "0RECV_B0",
    ]  # fmt: skip


def test_stages_of_one_rank_send_each_other_nothing_and_replicas_reduce_across_ranks_only():
    looped = build("interleaved-1f1b", devices=4, micro_batches=4)
    order = message_order(looped, shared=[(7, 0), (5, 0)], rank_of=(0, 0, 1, 1))
    assert {(message.stages, message.ranks) for message in order if message.kind is Kind.F} == {
        ((1, 2), (0, 1)), ((3, 4), (1, 0)), ((5, 6), (0, 1)),
    }  # fmt: skip
    assert {message.stages for message in order if message.kind is Kind.W} == {(7, 0)}
    copies = replicate(build("1f1b", 2, 2), replicas=2)
    assert message_order(copies)[-1] == Message(
        Kind.REDUCE_GRAD, stages=(0, 2), ranks=(0, 2), micro_batch=None
    )
    within = message_order(copies, rank_of=(0, 1, 0, 1))
    assert not [message for message in within if message.kind is Kind.REDUCE_GRAD]


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_can_issue_what_it_needs_and_what_it_has_made_without_waiting(seed):
    schedule = drawn(seed)
    last = schedule.stages - 1
    order = message_order(schedule, skips=[(0, last)] * (last > 1), shared=[(last, 0)])
    for device, row in enumerate(schedule.actions):
        own = [message for message in order if device in message.ranks]
        made, issued = set(), 0
        for action in row:
            needed = [at for at, message in enumerate(own) if touches(action, message, 1)]
            assert sends(own[issued : max(needed, default=-1) + 1], device) <= made
            issued = max(issued, *(at + 1 for at in needed), 0)
            made |= {message for message in own if touches(action, message, 0)}
            ready = [at for at, message in enumerate(own) if message in made]
            assert sends(own[issued : max(ready, default=-1) + 1], device) <= made
            issued = max(issued, *(at + 1 for at in ready), 0)
        assert issued == len(own)


def sends(messages, rank):
    return {message for message in messages if message.ranks[0] == rank}


def touches(action, message, end):
    """Whether the action makes (end 0) or reads (end 1) the message."""
    kinds = (Kind.F,) if message.kind is Kind.F else (Kind.B, Kind.I)
    same = action.kind in kinds and action.micro_batch == message.micro_batch
    return same and message.stages[end] == action.stage


@pytest.mark.parametrize("name", names())
def test_no_schedule_deadlocks_however_its_devices_are_grouped_to_ranks(name):
    choose = random.Random(name)
    whole = insert_reduce_grad(build(name, 4, 4))
    last = whole.model_stages - 1
    for queues in QUEUES:
        ranks = [choose.randrange(3) for _ in range(4)]
        check(whole, rendezvous=queues, rank_of=ranks, skips=[(0, last)] * (last > 1), shared=[(last, 0)])


@pytest.mark.parametrize("seed", range(12))
def test_the_checker_finds_exactly_the_deadlocks_there_are(seed):
    choose = random.Random(seed)
    schedule = insert_messages(drawn(seed))
    assert not any(deadlocks(schedule, queues) for queues in QUEUES)
    for _ in range(4):
        schedule = moved(choose, schedule)
        for queues in QUEUES:
            assert deadlocks(schedule, queues) == oracle(schedule, queues)


def deadlocks(schedule: Schedule, queues) -> bool:
    try:
        check(schedule, rendezvous=queues)
    except ScheduleError as error:
        assert re.match("deadlock of unbuffered messages with a queue for a", str(error))  # noqa: PT017
        return True
    return False


def oracle(schedule: Schedule, queues) -> bool:
    """Whether what must come before what is a circle: messages are one node for both of their ends."""
    graph = nx.DiGraph()
    for row in schedule.actions:
        last, before = {}, None
        for action in row:
            if action.kind not in SENDS + RECEIVES:
                if action.kind in NEEDED:
                    graph.add_edge(action._replace(kind=NEEDED[action.kind]), action)
                if before:
                    graph.add_edge(before, action)
                before = action
                continue
            forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
            step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
            message = action
            if action.kind in SENDS:
                kind = Kind.RECV_F if forward else Kind.RECV_B
                message = Action(kind, action.stage + step, action.micro_batch)
            if before:
                graph.add_edge(before, message)  # it is issued after the action
            peer = schedule.device_of[action.stage + step]
            queue = {"rank": None, "pair": peer, "edge": (peer, action.kind in SENDS)}[queues]
            if queue in last:
                graph.add_edge(last[queue], message)
            last[queue] = message
    return not nx.is_directed_acyclic_graph(graph)


def moved(choose: random.Random, schedule: Schedule) -> Schedule:
    """Move some message past its neighbour, where it still comes before or after its action."""
    rows = [list(row) for row in schedule.actions]
    row = choose.choice(rows)
    at = choose.randrange(len(row) - 1)
    first, second = row[at], row[at + 1]
    messages = sum(action.kind in SENDS + RECEIVES for action in (first, second))
    if messages == 2 or (messages == 1 and first[1:3] != second[1:3]):
        row[at : at + 2] = [second, first]
    return replace(schedule, actions=tuple(map(tuple, rows)))


def test_devices_that_would_reduce_in_different_orders_are_refused():
    crossed = Schedule.from_csv(
        "0F0,0B0,3F1,3B1,0REDUCE_GRAD,3REDUCE_GRAD\n2F1,1F0,1B0,2B1,1REDUCE_GRAD,2REDUCE_GRAD\n", replicas=2
    )
    waits = "device 0 at 0REDUCE_GRAD for 2REDUCE_GRAD; device 1 at 1REDUCE_GRAD for 3REDUCE_GRAD"
    with pytest.raises(ScheduleError, match=waits):
        message_order(crossed)
    check(crossed)  # within a process gradients are sent and summed
    with pytest.raises(ScheduleError, match="deadlock: device 0 at 0REDUCE_GRAD"):
        check(crossed, rendezvous=True)


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
    for ask in (message_order, check):
        with pytest.raises(ScheduleError, match=message):
            ask(build("1f1b", 3, 2), **arguments)


def test_a_schedule_with_messages_takes_no_further_ones():
    with pytest.raises(ScheduleError, match="1f1b has sends and receives of its own: skips="):
        check(insert_messages(build("1f1b", 2, 2)), rank_of=(0, 0))


LINE = [edge for a in range(7) for edge in ((a, a + 1), (a + 1, a))]


@pytest.mark.parametrize(
    ("edges", "rounds"),
    [
        ([], 0),
        ([(0, 1)], 1),
        (LINE, 4),
        ([*LINE, (7, 0), (0, 7)], 4),
        ([(a, b) for a in range(8) for b in range(8) if a != b], 14),
    ],
)
def test_edges_connect_in_disjoint_rounds(edges, rounds):
    found = connection_rounds(reversed(edges))
    assert len(found) == rounds
    assert sorted(edge for part in found for edge in part) == sorted(edges)
    for part in found:
        ends = [rank for edge in part for rank in edge]
        assert len(ends) == len(set(ends))
    with pytest.raises(ValueError, match=r"edge \(1, 1\) leads from a rank to itself"):
        connection_rounds([(1, 1)])
