"""Presolve: removes nodes that cost nothing from a problem, so that it has fewer downsets; no optimum is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .problem import Net, Problem, Split, tidy_nets


@dataclass(frozen=True)
class Presolved:
    """A smaller problem, and how its cuts become cuts of the whole problem.

    Attributes:
        problem: what is left.
        kept: for each node of ``problem``, its node in the whole problem.
        steps: the removed nodes in order, each with its neighbours at that time and ``min`` or ``max``: the node joins
            the first or the last of their stages.
        nodes: number of nodes of the whole problem.
    """

    problem: Problem
    kept: tuple[int, ...]
    steps: tuple[tuple[int, tuple[int, ...], Callable[[list[int]], int]], ...]
    nodes: int

    def restore(self, split: Split) -> Split:
        """Return the cut of the whole problem with the same loads."""
        stage_of = [0] * self.nodes
        for node, stage in zip(self.kept, split.stage_of, strict=True):
            stage_of[node] = stage
        for node, neighbours, pick in reversed(self.steps):
            stage_of[node] = pick([stage_of[other] for other in neighbours])
        return Split(tuple(stage_of), split.types)


def presolve(problem: Problem) -> Presolved:
    """Return the problem without the zero-time nodes whose best stage follows from the stages of their neighbours.

    A source whose tensors each go to all its successors goes with the first of them, a sink likewise with the last of
    its predecessors: then no further stage touches these tensors, and no load rises. A zero-time node with bytes is
    removed only if all bytes of the graph fit any one device. A node whose neighbour was removed is looked at again.
    O(nodes + edges + pins) for each time that a node is looked at.

    This takes the published GNMT graphs from 17,914 downsets to 100. A rule for nodes between two others left 82, and
    no graph took longer without it.
    """
    after = [set(others) for others in problem.successors]
    before = [set(others) for others in problem.predecessors]
    pins = [set(net.pins) for net in problem.nets]
    costs_nothing = np.all([device_type.seconds == 0 for device_type in problem.types], axis=0)
    if problem.bytes.sum() > min(device_type.memory for device_type in problem.types):
        costs_nothing &= problem.bytes == 0
    steps: dict[int, tuple[int, tuple[int, ...], Callable[[list[int]], int]]] = {}
    waiting = deque(np.nonzero(costs_nothing)[0].tolist())
    while waiting:
        node = waiting.popleft()
        neighbours = before[node] | after[node]
        if node in steps or not neighbours or (before[node] and after[node]):
            continue
        nets = [pins[number] for number in problem.nets_of[node]]
        if not all(neighbours <= net for net in nets if len(net) > 1):
            continue
        steps[node] = node, tuple(sorted(neighbours)), min if after[node] else max
        for net in nets:
            net.discard(node)
        for other in neighbours:
            before[other].discard(node)
            after[other].discard(node)
            if costs_nothing[other]:
                waiting.append(other)
    if not steps:
        return Presolved(problem, tuple(range(len(problem))), (), len(problem))
    kept = [node for node in range(len(problem)) if node not in steps]
    number_of = {node: index for index, node in enumerate(kept)}
    smaller = Problem(
        successors=tuple(tuple(sorted(number_of[other] for other in after[node])) for node in kept),
        bytes=problem.bytes[kept],
        nets=tidy_nets(
            Net(net.seconds, tuple(number_of[pin] for pin in left))
            for net, left in zip(problem.nets, pins, strict=True)
        ),
        types=tuple(replace(device_type, seconds=device_type.seconds[kept]) for device_type in problem.types),
    )
    return Presolved(smaller, tuple(kept), tuple(steps.values()), len(problem))
