"""Presolve: removes nodes that cost nothing from a problem, so that it has fewer downsets; no optimum is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .problem import Net, Problem, Split, tidy_nets

Pins = frozenset[int]


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

    A zero-time node with bytes is removed only if all bytes of the graph fit any one device. Each rule moves
    a node from any stage to its known stage without raising the load of any stage:

    - a source or sink with one neighbour that is in all its tensors goes with that neighbour;
    - between one predecessor and one successor, with tensors of these three alone, it goes across the dearer tensor;
    - a source whose tensors each go to all its successors goes with the first of them, a sink likewise with the last
      of its predecessors: then no further stage touches these tensors.

    An edge (a, b) is redundant if a longer path leads from a to b. Redundant edges are removed first, so that more
    nodes have a single neighbour.

    Rules repeat until none applies: O(nodes + edges + pins) for each round.
    """
    work = _Shrinking(problem)
    while work.round():
        pass
    return work.result()


class _Shrinking:
    """A problem from which nodes are being taken out."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._after = _needed(problem)
        self._before: list[set[int]] = [set() for _ in range(len(problem))]
        for node, others in enumerate(self._after):
            for other in others:
                self._before[other].add(node)
        self._cost: dict[Pins, float] = {frozenset(net.pins): net.seconds for net in problem.nets}
        self._nets: list[set[Pins]] = [set() for _ in range(len(problem))]
        for pins in self._cost:
            for pin in pins:
                self._nets[pin].add(pins)
        free = np.all([device_type.seconds == 0 for device_type in problem.types], axis=0)
        if problem.bytes.sum() > min(device_type.memory for device_type in problem.types):
            free &= problem.bytes == 0
        self._candidates = np.nonzero(free)[0].tolist()
        self._steps: list[tuple[int, tuple[int, ...], Callable[[list[int]], int]]] = []
        self._gone: set[int] = set()

    def round(self) -> bool:
        """Apply the rules to each node once; return True if any applied."""
        changed = False
        for node in self._candidates:
            if node not in self._gone:
                changed |= self._beside_one(node) or self._between_two(node) or self._with_all(node)
        return changed

    def _beside_one(self, node: int) -> bool:
        neighbours = self._before[node] | self._after[node]
        if len(neighbours) != 1:
            return False
        (other,) = neighbours
        if not all(other in pins for pins in self._nets[node]):
            return False
        self._merge(node, other)
        return True

    def _between_two(self, node: int) -> bool:
        if len(self._before[node]) != 1 or len(self._after[node]) != 1:
            return False
        (first,), (last,) = self._before[node], self._after[node]
        if not all(pins <= {first, node, last} for pins in self._nets[node]):
            return False
        dear = self._cost.get(frozenset({first, node}), 0.0)
        cheap = self._cost.get(frozenset({node, last}), 0.0)
        self._merge(node, first if dear >= cheap else last)
        return True

    def _with_all(self, node: int) -> bool:
        source = not self._before[node]
        neighbours = self._after[node] if source else self._before[node]
        if not neighbours or (not source and self._after[node]):
            return False
        if not all(neighbours <= pins for pins in self._nets[node]):
            return False
        self._steps.append((node, tuple(sorted(neighbours)), min if source else max))
        for pins in list(self._nets[node]):
            self._replace(pins, pins - {node})
        self._remove(node)
        return True

    def _merge(self, node: int, other: int) -> None:
        """Merge ``node`` into ``other``, which takes over its edges and tensors."""
        self._steps.append((node, (other,), min))
        for pins in list(self._nets[node]):
            self._replace(pins, pins - {node} | {other})
        before, after = self._before[node] - {other}, self._after[node] - {other}
        self._remove(node)
        for earlier in before:
            self._after[earlier].add(other)
            self._before[other].add(earlier)
        for later in after:
            self._before[later].add(other)
            self._after[other].add(later)

    def _remove(self, node: int) -> None:
        self._gone.add(node)
        for earlier in self._before[node]:
            self._after[earlier].discard(node)
        for later in self._after[node]:
            self._before[later].discard(node)

    def _replace(self, pins: Pins, by: Pins) -> None:
        seconds = self._cost.pop(pins)
        for pin in pins:
            self._nets[pin].discard(pins)
        if len(by) > 1:
            self._cost[by] = self._cost.get(by, 0.0) + seconds
            for pin in by:
                self._nets[pin].add(by)

    def result(self) -> Presolved:
        """Return the remaining problem, renumbered in the same order."""
        whole = self._problem
        kept = [node for node in range(len(whole)) if node not in self._gone]
        number = {node: index for index, node in enumerate(kept)}
        size = whole.bytes.copy()
        for node, neighbours, _ in self._steps:
            if len(neighbours) == 1:
                size[neighbours[0]] += size[node]
        problem = Problem(
            successors=tuple(tuple(sorted(number[other] for other in self._after[node])) for node in kept),
            bytes=size[kept],
            nets=tidy_nets(
                Net(seconds, tuple(number[pin] for pin in pins)) for pins, seconds in self._cost.items()
            ),
            types=tuple(
                replace(device_type, seconds=device_type.seconds[kept]) for device_type in whole.types
            ),
        )
        return Presolved(problem, tuple(kept), tuple(self._steps), len(whole))


def _needed(problem: Problem) -> list[set[int]]:
    """Return the successors of each node that cannot be reached through another successor."""
    found: list[set[int]] = [set(after) for after in problem.successors]
    if all(len(after) < 2 for after in found):
        return found
    reach = [0] * len(problem)
    for node in range(len(problem) - 1, -1, -1):
        for after in sorted(problem.successors[node]):
            if reach[node] >> after & 1:
                found[node].discard(after)
            reach[node] |= reach[after] | 1 << after
    return found
