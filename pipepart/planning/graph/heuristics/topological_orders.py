"""Topological orders whose intervals are likely to be good stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..problem import Problem


def topological_orders(problem: Problem) -> Iterator[list[int]]:
    """Yield the execution order, then depth-first orders, then orders that keep few tensors cut.

    Each takes O(nodes + edges), the last two O(nodes × ready nodes × pins of a node).
    """
    yield list(range(len(problem)))
    yield _follow(problem, first=False)
    yield _follow(problem, first=True)
    for weight in (1.0, -1.0):
        yield _fewest_open(problem, lambda node, weight=weight: weight * float(problem.work[node]))


def _follow(problem: Problem, *, first: bool) -> list[int]:
    """Continue with a node that became ready last; of several from one step, with the first or the last."""
    waiting = [len(before) for before in problem.predecessors]
    stack = [node for node in range(len(problem)) if not waiting[node]]
    if first:
        stack.reverse()
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        freed = []
        for after in problem.successors[node]:
            waiting[after] -= 1
            if not waiting[after]:
                freed.append(after)
        stack.extend(reversed(freed) if first else freed)
    return order


def _fewest_open(problem: Problem, tie: Callable[[int], float]) -> list[int]:
    """Continue with the ready node that adds least to the seconds of the tensors cut; ``tie`` breaks ties."""
    waiting = [len(before) for before in problem.predecessors]
    ready = {node for node in range(len(problem)) if not waiting[node]}
    left = [len(net.pins) for net in problem.nets]
    order = []

    def added(node: int) -> tuple[float, float, int]:
        change = 0.0
        for number in problem.nets_of[node]:
            net = problem.nets[number]
            if left[number] == 1:
                change -= net.seconds
            elif left[number] == len(net.pins):
                change += net.seconds
        return change, tie(node), node

    while ready:
        node = min(ready, key=added)
        ready.remove(node)
        order.append(node)
        for number in problem.nets_of[node]:
            left[number] -= 1
        for after in problem.successors[node]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.add(after)
    return order
