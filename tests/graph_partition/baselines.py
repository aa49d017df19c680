"""What others do with a layer graph, written anew from their papers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import networkx as nx


def balanced_blocks(costs: Sequence[float], parts: int) -> list[int]:
    """Stage of each layer by Bárány and Grinberg's blocks, as torchgpipe balances (Kim et al. 2020, section 4).

    From equal counts on, a border of the largest block moves one layer away from it, as long as that betters the
    largest block; written anew from the paper.
    """
    count = len(costs)
    bounds = [count * part // parts for part in range(parts + 1)]

    def size(part: int) -> float:
        return sum(costs[bounds[part] : bounds[part + 1]])

    while True:
        largest = max(range(parts), key=size)
        high = size(largest)
        moves = []
        for border, step in ((largest, 1), (largest + 1, -1)):
            if 0 < border < parts and bounds[largest + 1] - bounds[largest] > 1:
                bounds[border] += step
                beside = size(largest - 1 if step == 1 else largest + 1)
                moves.append((max(size(largest), beside), border, step))
                bounds[border] -= step
        if not moves or min(moves)[0] >= high:
            return _stages(bounds)
        _, border, step = min(moves)
        bounds[border] += step


def partition_balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Stage of each layer with the smallest largest sum, as DeepSpeed's ``partition_balanced`` finds by bisection."""
    low, high = max(costs), sum(costs)
    for _ in range(60):
        middle = (low + high) / 2
        if len(_greedy(costs, middle)) - 1 <= parts:
            high = middle
        else:
            low = middle
    return _stages(_greedy(costs, high))


def pipedream(graph: nx.DiGraph, parts: int) -> list[list[Hashable]]:
    """Stages by PipeDream's optimizer for a straight pipeline (Narayanan et al., SOSP 2019, section 3.1).

    The states are the sets of nodes that hold all predecessors of theirs. The slowest part of the best pipeline up to
    a state is the least, over the states inside it, of the largest of: the slowest part up to there, twice what
    crosses there, and the compute between.
    """
    states = _downsets(graph)
    compute = [sum(graph.nodes[node]["seconds"] for node in state) for state in states]
    crossing = [
        sum(graph.nodes[node]["transfer_seconds"] for node in state if not set(graph[node]) <= state)
        for state in states
    ]
    best: list[tuple[float, tuple[int, ...]]] = [(seconds, (index,)) for index, seconds in enumerate(compute)]
    for _ in range(parts - 1):
        longer = list(best)
        for index, state in enumerate(states):
            for inner in range(1, index):
                if states[inner] < state:
                    slowest = max(best[inner][0], 2 * crossing[inner], compute[index] - compute[inner])
                    longer[index] = min(longer[index], (slowest, (*best[inner][1], index)))
        best = longer
    borders = [states[index] for index in best[-1][1]]
    return [
        [node for node in graph if node in border - before]
        for before, border in zip([frozenset(), *borders[:-1]], borders, strict=True)
    ]


def _downsets(graph: nx.DiGraph) -> list[frozenset[Hashable]]:
    found: set[frozenset[Hashable]] = {frozenset()}
    for node in nx.topological_sort(graph):
        before = set(graph.predecessors(node))
        found |= {state | {node} for state in found if before <= state}
    return sorted(found, key=lambda state: (len(state), sorted(map(repr, state))))


def _greedy(costs: Sequence[float], limit: float) -> list[int]:
    bounds, load = [0], 0.0
    for index, cost in enumerate(costs):
        if load + cost > limit and index > bounds[-1]:
            bounds.append(index)
            load = 0.0
        load += cost
    return [*bounds, len(costs)]


def _stages(bounds: Sequence[int]) -> list[int]:
    return [part for part in range(len(bounds) - 1) for _ in range(bounds[part], bounds[part + 1])]
