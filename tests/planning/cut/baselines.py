"""What others do with a layer graph: balance the seconds of its execution order, tensors left out of account."""

from __future__ import annotations

from collections.abc import Sequence


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
