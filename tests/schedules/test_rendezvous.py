"""Deadlocks of unbuffered messages: none with our order, found with a wrong one, and named as a cycle."""

import random
import re
from dataclasses import replace

import networkx as nx
import pytest

from schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    StageCosts,
    build,
    check,
    insert_messages,
    insert_reduce_grad,
    names,
    replicate,
    search,
)
from tests.support.searched import random_order, random_placement

QUEUES = ("rank", "pair", "edge")
SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)


def generated():
    """Every generator at some sizes: 42 schedules and more."""
    for name in names():
        for devices, micro_batches in ((2, 4), (4, 8), (5, 10)):
            if name != "chimera" or devices % 2 == 0:
                yield build(name, devices, micro_batches)


def drawn(seed):
    choose = random.Random(seed)
    devices = choose.randint(2, 5)
    homes = random_placement(choose, choose.randint(devices, 3 * devices), devices)
    return random_order(choose, homes, choose.randint(2, 6), in_turn=False)


def searched(seed):
    draw = random.Random(seed)
    seconds = [[draw.uniform(0.5, 2) for _ in range(4)] for _ in range(3)]
    costs = StageCosts(*seconds, stash_bytes=[1] * 4, latency=0.1)
    return search(costs, devices=draw.choice([2, 4]), micro_batches=6, seed=seed)


def deferred_by_parity(schedule):
    """Each receive as late as its action allows; only before a send to a higher device, those from that device first.

    What torch.distributed.pipelining 2.13 does with ``defer_pp_recv=True``.
    """
    rows = []
    for device, row in enumerate(schedule.actions):
        moved, deferred = [], []
        for action in row:
            if action.kind in RECEIVES:
                deferred.append(action)
                continue
            first = []
            if action.kind in SENDS and (peer := peer_of(schedule, action)) > device:
                first = [receive for receive in deferred if peer_of(schedule, receive) == peer]
            wanted = {leaf._replace(kind=receive) for leaf in action.leaves for receive in receives(leaf)}
            first += [receive for receive in deferred if receive in wanted]
            moved += [*first, action]
            deferred = [receive for receive in deferred if receive not in first]
        rows.append((*moved, *deferred))
    return replace(schedule, actions=tuple(rows))


def peer_of(schedule, message):
    return schedule.device_of[message.stage + (1 if message.kind in (Kind.SEND_F, Kind.RECV_B) else -1)]


def receives(leaf):
    return {Kind.F: [Kind.RECV_F], Kind.I: [Kind.RECV_B], Kind.B: [Kind.RECV_B]}.get(leaf.kind, [])


def deadlocks(schedule, queues):
    try:
        check(schedule, rendezvous=queues)
    except ScheduleError as error:
        assert re.match("deadlock of unbuffered messages with a queue for a", str(error))  # noqa: PT017
        return True
    return False


def count(found):
    """How many of the schedules deadlock with each kind of queue: as they are, and deferred by parity."""
    whole, deferred = [], []
    for schedule in found:
        explicit = insert_messages(schedule)
        assert not deadlocks(explicit, "rank")
        wrong = deferred_by_parity(explicit)
        whole.append([deadlocks(schedule, queues) for queues in QUEUES])
        deferred.append([deadlocks(wrong, queues) for queues in QUEUES])
    return [[sum(column) for column in zip(*rows, strict=True)] for rows in (whole, deferred)]


def test_no_generated_schedule_deadlocks_and_most_do_if_receives_are_deferred_by_parity():
    schedules = list(generated())
    assert len(schedules) >= 42
    whole, deferred = count(schedules)
    assert whole == [0, 0, 0]
    assert len(schedules) > deferred[0] >= deferred[1] >= deferred[2] > 0
    assert deferred[0] > 0.8 * len(schedules)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(50, 300, 50))]
)
def test_no_drawn_schedule_deadlocks_and_most_do_if_receives_are_deferred_by_parity(first):
    whole, deferred = count(map(drawn, range(first, first + 50)))
    assert whole == [0, 0, 0]
    assert 50 >= deferred[0] >= deferred[1] >= deferred[2] > 35


@pytest.mark.parametrize("seed", range(4))
def test_no_searched_schedule_deadlocks(seed):
    found = searched(seed)
    for queues in QUEUES:
        check(found, rendezvous=queues, skips=[(0, 2), (1, 3)], shared=[(3, 0)])


@pytest.mark.parametrize("seed", range(30))
def test_no_grouping_of_devices_to_ranks_deadlocks(seed):
    choose = random.Random(seed)
    schedule = drawn(seed)
    rank_of = [choose.randrange(3) for _ in range(schedule.devices)]
    last = schedule.stages - 1
    for queues in QUEUES:
        check(
            schedule, rendezvous=queues, rank_of=rank_of, skips=[(0, last)] * (last > 1), shared=[(last, 0)]
        )


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "chimera"])
def test_reductions_among_the_messages_do_not_deadlock(name):
    pipeline = build(name, 2, 4)
    early = replicate(insert_reduce_grad(pipeline), replicas=2)
    for queues in QUEUES:
        check(early, rendezvous=queues)
        check(replicate(pipeline, 3), rendezvous=queues, rank_of=(0, 1, 2, 3, 3, 2))


def oracle(schedule, queues):
    """Whether what must come before what is a circle: messages are one node for both of their ends."""
    graph = nx.DiGraph()
    for row in schedule.actions:
        last, before = {}, None
        for action in row:
            peer = peer_of(schedule, action) if action.kind in SENDS + RECEIVES else None
            if peer is None:
                for receive in receives(action):
                    graph.add_edge(action._replace(kind=receive), action)
                if before:
                    graph.add_edge(before, action)
                before = action
                continue
            message = action
            if action.kind in SENDS:
                step, kind = (1, Kind.RECV_F) if action.kind is Kind.SEND_F else (-1, Kind.RECV_B)
                message = Action(kind, action.stage + step, action.micro_batch)
            if before:
                graph.add_edge(before, message)  # it is issued after the action
            queue = {"rank": None, "pair": peer, "edge": (peer, action.kind in SENDS)}[queues]
            if queue in last:
                graph.add_edge(last[queue], message)
            last[queue] = message
    return not nx.is_directed_acyclic_graph(graph)


@pytest.mark.parametrize("seed", range(60))
def test_the_checker_finds_exactly_the_deadlocks_there_are(seed):
    choose = random.Random(seed)
    schedule = insert_messages(drawn(seed))
    for _ in range(4):
        schedule = moved(choose, schedule)
        for queues in QUEUES:
            assert deadlocks(schedule, queues) == oracle(schedule, queues)


def moved(choose, schedule):
    """Move some message past its neighbour, where it still comes before or after its action."""
    rows = [list(row) for row in schedule.actions]
    row = choose.choice(rows)
    at = choose.randrange(len(row) - 1)
    first, second = row[at], row[at + 1]
    bound = first.kind in SENDS + RECEIVES and second.kind in SENDS + RECEIVES
    belongs = first[1:3] == second[1:3]
    messages = sum(action.kind in SENDS + RECEIVES for action in (first, second))
    if bound or (messages == 1 and not belongs):
        row[at : at + 2] = [second, first]
    return replace(schedule, actions=tuple(map(tuple, rows)))


def test_the_cycle_names_who_waits_for_whom():
    # Device 1 receives micro-batch 1 before micro-batch 0, which device 0 sends first.
    swapped = Schedule.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    check(swapped, rendezvous=False)
    for queues, said in zip(QUEUES, ("rank", "pair of ranks", "directed edge"), strict=True):
        with pytest.raises(ScheduleError) as caught:
            check(swapped, rendezvous=queues)
        what, cycle = str(caught.value).split(": ")
        assert what == f"deadlock of unbuffered messages with a queue for a {said}"
        assert sorted(cycle.split("; ")) == [
            "0SEND_F0 waits for 1RECV_F0 on rank 1",
            "0SEND_F1 stands behind 0SEND_F0 on rank 0",
            "1RECV_F0 stands behind 1RECV_F1 on rank 1",
            "1RECV_F1 waits for 0SEND_F1 on rank 0",
        ]


def test_a_receive_behind_the_action_that_waits_for_another_is_named():
    late = Schedule.from_csv(
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    with pytest.raises(
        ScheduleError,
        match=r"device 1 at 1F0 waits for 1RECV_F0; 1RECV_F0 waits for 0SEND_F0 on rank 0; "
        "0SEND_F0 stands behind 0SEND_F1 on rank 0; 0SEND_F1 waits for 1RECV_F1 on rank 1; "
        "1RECV_F1 is not issued yet by device 1",
    ):
        check(late, rendezvous="edge")


def test_a_schedule_with_messages_takes_no_further_ones():
    with pytest.raises(ScheduleError, match="1f1b has sends and receives of its own: skips="):
        check(insert_messages(build("1f1b", 2, 2)), rank_of=(0, 0))
