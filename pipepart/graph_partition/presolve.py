"""Presolve: removes nodes without cost from a problem, which leaves fewer downsets and the same optimum."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .problem import Net, Problem, Split, tidy_nets


@dataclass(frozen=True)
class Presolved:
    """A smaller problem, with the steps that turn its cuts into cuts of the whole problem.

    Attributes:
        problem: the smaller problem.
        remaining: for each node of ``problem``, the same node in the whole problem.
        steps: the removed nodes in order of removal, each with its neighbours at that time, and ``min`` or ``max`` if
            the node joins the first or the last stage of these neighbours.
        nodes: number of nodes of the whole problem.
    """

    problem: Problem
    remaining: tuple[int, ...]
    steps: tuple[tuple[int, tuple[int, ...], Callable[[list[int]], int]], ...]
    nodes: int

    def restore(self, split: Split) -> Split:
        """Return the cut of the whole problem with the same loads as ``split``."""
        stage_of = [0] * self.nodes
        for node, stage in zip(self.remaining, split.stage_of, strict=True):
            stage_of[node] = stage
        for node, neighbours, pick in reversed(self.steps):
            stage_of[node] = pick([stage_of[neighbour] for neighbour in neighbours])
        return Split(tuple(stage_of), split.types)


def presolve(problem: Problem) -> Presolved:
    """Return the problem without the zero-time nodes whose best stage follows from the stages of their neighbours.

    If each tensor of a source goes to all its successors, the source joins the stage of its first successor. Likewise
    a sink joins the stage of its last predecessor. Then no additional stage uses these tensors, so no load grows. A
    zero-time node with bytes is removed only if all bytes of the graph fit each single device. When a node is removed,
    its neighbours are checked again. Each check takes O(nodes + edges + pins).

    This reduces the published GNMT graphs from 17,914 downsets to 100. An additional rule for nodes between two
    neighbours reduced them to 82, and saved no time on any graph.
    """
    after = [set(nodes) for nodes in problem.successors]
    before = [set(nodes) for nodes in problem.predecessors]
    pins = [set(net.pins) for net in problem.nets]
    costs_nothing = np.all([device_type.seconds == 0 for device_type in problem.types], axis=0)
    if problem.bytes.sum() > min(device_type.memory for device_type in problem.types):
        costs_nothing &= problem.bytes == 0
    steps: dict[int, tuple[int, tuple[int, ...], Callable[[list[int]], int]]] = {}
    unchecked = deque(np.nonzero(costs_nothing)[0].tolist())
    while unchecked:
        node = unchecked.popleft()
        neighbours = before[node] | after[node]
        if node in steps or not neighbours or (before[node] and after[node]):
            continue
        nets = [pins[number] for number in problem.nets_of[node]]
        if not all(neighbours <= net for net in nets if len(net) > 1):
            continue
        steps[node] = node, tuple(sorted(neighbours)), min if after[node] else max
        for net in nets:
            net.discard(node)
        for neighbour in neighbours:
            before[neighbour].discard(node)
            after[neighbour].discard(node)
            if costs_nothing[neighbour]:
                unchecked.append(neighbour)
    if not steps:
        return Presolved(problem, tuple(range(len(problem))), (), len(problem))
    remaining = [node for node in range(len(problem)) if node not in steps]
    number_of = {node: index for index, node in enumerate(remaining)}
    smaller = Problem(
        successors=tuple(
            tuple(sorted(number_of[successor] for successor in after[node])) for node in remaining
        ),
        bytes=problem.bytes[remaining],
        nets=tidy_nets(
            Net(net.seconds, tuple(number_of[pin] for pin in left))
            for net, left in zip(problem.nets, pins, strict=True)
        ),
        types=tuple(
            replace(device_type, seconds=device_type.seconds[remaining]) for device_type in problem.types
        ),
    )
    return Presolved(smaller, tuple(remaining), tuple(steps.values()), len(problem))
