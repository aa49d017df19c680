"""Messages have one order for all ranks, which cannot deadlock even if nothing is buffered."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from schedules import Kind, Schedule, build, connection_rounds, message_order
from tests.support.searched import random_order, random_placement

Key = tuple[bool, int, int, int | None]  # an output, by which stage for which, of which micro-batch
Events = Mapping[int, Sequence[tuple[bool, Key]]]


def events_of(schedule: Schedule) -> Events:
    """What each device receives before an action and sends after it."""
    found: dict[int, list[tuple[bool, Key]]] = {}
    for device, row in enumerate(schedule.leaves):
        found[device] = own = []
        for kind, stage, number, _ in row:
            before, after = schedule.previous_stage(stage), schedule.next_stage(stage)
            if kind in (Kind.I, Kind.B):
                before, after = after, before
            elif kind is not Kind.F:
                continue
            if before is not None and schedule.device_of[before] != device:
                own.append((False, (kind is Kind.F, before, stage, number)))
            if after is not None and schedule.device_of[after] != device:
                own.append((True, (kind is Kind.F, stage, after, number)))
    return found


def stuck(events: Events, order: Sequence[Key]) -> list[int]:
    """Return the ranks that wait for ever if each begins its messages in this order, in one queue without buffers.

    Before it sends or needs a message, a rank begins all that come before it. A message is done when it is the first
    in the queues of both its ranks. A rank waits only for messages that it needs.
    """
    queues = {rank: [key for key in order if key in {key for _, key in row}] for rank, row in events.items()}
    begun: dict[int, set[Key]] = {rank: set() for rank in events}
    left, done = {rank: list(row) for rank, row in events.items()}, set[Key]()
    moved = True
    while moved:
        moved = False
        for rank, row in left.items():
            while row:
                sends, key = row[0]
                ahead = queues[rank][: queues[rank].index(key) + 1] if key in queues[rank] else []
                if any((True, one) in row[1:] for one in ahead):
                    break  # it has not made what it has to send first
                begun[rank].update(ahead)
                if not sends and key not in done:
                    break
                row.pop(0)
                moved = True
        for key in {queue[0] for queue in queues.values() if queue}:
            ends = [rank for rank, row in events.items() if any(key == one for _, one in row)]
            if all(queues[rank][0] == key and key in begun[rank] for rank in ends):
                done.add(key)
                moved = True
                for rank in ends:
                    queues[rank].pop(0)
    return [rank for rank in events if left[rank] or queues[rank]]


def assert_all_arrive(events: Events) -> None:
    order = message_order(events)
    assert not stuck(events, [key for key, *_ in order])
    assert all((True, key) in events[sender] for key, sender, _ in order)
    assert all((False, key) in events[receiver] for key, _, receiver in order)


@pytest.mark.parametrize("name", ["gpipe", "zb-v", "dualpipe-v", "hanayo"])
def test_no_schedule_deadlocks(name):
    assert_all_arrive(events_of(build(name, 4, 8)))


@pytest.mark.parametrize("seed", range(12))
def test_no_other_order_of_actions_deadlocks(seed):
    choose = random.Random(seed)
    devices = choose.randint(2, 5)
    homes = random_placement(choose, choose.randint(devices, 3 * devices), devices)
    assert_all_arrive(events_of(random_order(choose, homes, choose.randint(2, 6), in_turn=False)))


def test_an_order_in_which_a_message_comes_before_what_its_sender_needs_deadlocks():
    events = events_of(build("1f1b", 2, 2))
    order = [key for key, *_ in message_order(events)]
    first_gradient = next(at for at, key in enumerate(order) if not key[0])
    order.insert(0, order.pop(first_gradient))
    assert stuck(events, order) == [0, 1]


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
