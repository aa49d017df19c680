"""The order in which ranks exchange the messages of a step, and in which they connect, so that none waits for ever."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Edge = tuple[int, int]
_Key = TypeVar("_Key", bound=Hashable)


def message_order(events: Mapping[int, Sequence[tuple[bool, _Key]]]) -> list[tuple[_Key, int, int]]:
    """Return all messages of a step in one order, each with the workers that send and receive it.

    The order is that of the moments at which they would be sent if each took one unit of time and all else none. So
    each message comes after those that its sender received before it.

    Args:
        events: of each worker, in the order of its actions: whether it sends a message, and the message.

    Raises:
        RuntimeError: a message that a worker receives is never sent.

    >>> message_order({0: [(True, "a"), (False, "b")], 1: [(False, "a"), (True, "b")]})
    [('a', 0, 1), ('b', 1, 0)]
    """
    receivers = {key: worker for worker, row in events.items() for sends, key in row if not sends}
    left = {worker: deque(row) for worker, row in sorted(events.items())}
    clocks = dict.fromkeys(left, 0)
    moments: dict[_Key, tuple[int, int]] = {}
    able = True
    while able:
        able = False
        for worker, row in left.items():
            while row and (row[0][0] or row[0][1] in moments):
                sends, key = row.popleft()
                if sends:
                    clocks[worker] += 1
                    moments[key] = clocks[worker], worker
                else:
                    clocks[worker] = max(clocks[worker], moments[key][0])
                able = True
    if missing := [row[0][1] for row in left.values() if row]:
        raise RuntimeError(f"messages {missing} of a step are received and were never sent")
    ordered = sorted(moments, key=lambda key: moments[key])
    return [(key, moments[key][1], receivers[key]) for key in ordered]


def connection_rounds(edges: Iterable[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """Group directed edges into rounds, so that each rank has at most one edge in a round.

    If all ranks connect the edges round by round, each has one peer at a time, which waits for nobody else. The number
    of rounds is less than twice the largest number of edges of a rank; for neighbours in a line or an even ring, and
    for all pairs among 2, 4 or 8 ranks, it is that number, which is the least possible.

    Args:
        edges: (from, to) in any order.

    Raises:
        ValueError: an edge leads from a rank to itself.

    Source: greedy edge colouring. Edges come in lexicographic order, both directions together.

    >>> connection_rounds([(0, 1), (1, 2), (1, 0), (2, 1), (2, 3)])
    (((0, 1), (2, 3)), ((1, 0),), ((1, 2),), ((2, 1),))
    """
    rounds: list[list[Edge]] = []
    busy: defaultdict[int, set[int]] = defaultdict(set)
    for edge in sorted(set(edges), key=lambda edge: (min(edge), max(edge), edge)):
        source, target = edge
        if source == target:
            raise ValueError(f"edge {edge} leads from a rank to itself, which needs no connection")
        taken = busy[source] | busy[target]
        number = next(number for number in range(len(rounds) + 1) if number not in taken)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(edge)
        busy[source].add(number)
        busy[target].add(number)
    return tuple(map(tuple, rounds))
