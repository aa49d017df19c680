"""Plans the order in which ranks connect: rounds of edges, with at most one edge per rank in a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

Edge = tuple[int, int]


def connection_rounds(edges: Iterable[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """Group directed edges into rounds, so that each rank has at most one edge in a round.

    If all ranks connect the edges round by round, each has one peer at a time, which waits for nobody else. The number
    of rounds is less than twice the largest number of edges of a rank; for neighbours in a line or an even ring, and
    for all pairs among 2, 4 or 8 ranks, it is that number, which is the least possible.

    Args:
        edges: (from, to) in any order, such as ``message.ranks`` of all messages of a step, without the collectives.

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
