"""Topological orders whose intervals are likely to be good stages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..problem import Problem


def topological_orders(problem: Problem) -> Iterator[list[int]]:
    """Yield the execution order, then an order that keeps few tensors cut."""
    yield list(range(len(problem)))
    yield _least_crossed_order(problem)


def _least_crossed_order(problem: Problem) -> list[int]:
    """Go on with the ready node that adds least to the seconds of the tensors cut, then with the one of least work.

    O(pins × log pins): a node is entered in the heap again whenever the seconds that it adds change. Depth-first orders
    gave no better cut of any measured graph.
    """
    waiting = [len(before) for before in problem.predecessors]
    left = [len(net.pins) for net in problem.nets]  # pins that are not in the order yet
    order: list[int] = []
    taken = [False] * len(problem)

    def entry(node: int) -> tuple[float, float, int]:
        nets = [(problem.nets[number], left[number]) for number in problem.nets_of[node]]
        opened = sum(net.seconds for net, pins in nets if pins == len(net.pins))
        closed = sum(net.seconds for net, pins in nets if pins == 1)
        return opened - closed, float(problem.work[node]), node

    heap = [entry(node) for node in range(len(problem)) if not waiting[node]]
    heapq.heapify(heap)
    while heap:
        top = heapq.heappop(heap)
        node = top[2]
        if taken[node] or top != entry(node):
            continue  # the node has a later entry
        taken[node] = True
        order.append(node)
        for after in problem.successors[node]:
            waiting[after] -= 1
        changed = [after for after in problem.successors[node] if not waiting[after]]
        for number in problem.nets_of[node]:
            pins = problem.nets[number].pins
            left[number] -= 1
            if left[number] in (1, len(pins) - 1):
                changed += [pin for pin in pins if not waiting[pin] and not taken[pin]]
        for other in changed:
            heapq.heappush(heap, entry(other))
    return order
