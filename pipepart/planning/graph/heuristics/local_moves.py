"""Improves a cut by moving single nodes to the previous or the next stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from schedules.searching.clock import Clock

from ..problem import Problem, Split

MOST_MOVES = 2000


def improve_by_moves(problem: Problem, split: Split, clock: Clock) -> Split:
    """Improve a cut by hill climbing: move nodes off the most loaded stage while that lowers the larger of both loads.

    A move between neighbours changes only the loads of these two stages: every other stage cuts the same tensors as
    before. Each step takes O(nets of the nodes of the stage).
    """
    stages = _Stages(problem, split)
    for _ in range(MOST_MOVES):
        worst = max(range(len(stages.loads)), key=stages.loads.__getitem__)
        limit = stages.loads[worst] * (1 - 1e-12)
        moves = (stages.loads_after(node, worst, target) for node, target in stages.moves(worst))
        best = min((move for move in moves if move[0] < limit), default=None)
        if best is None or clock.is_over:
            break
        stages.move(*best[1:])
    return stages.split()


class _Stages:
    """The stages of a cut: their nodes, bytes and loads, and the pins that each net has in each stage."""

    def __init__(self, problem: Problem, split: Split) -> None:
        self._problem = problem
        self._types = split.types
        self._stage_of = list(split.stage_of)
        self._nodes = [set(members) for members in split.stages]
        self._bytes = [int(problem.bytes[members].sum()) for members in split.stages]
        self._pins = [Counter(self._stage_of[pin] for pin in net.pins) for net in problem.nets]
        self.loads = [
            problem.stage_seconds(members, problem.types[kind])
            for members, kind in zip(split.stages, split.types, strict=True)
        ]

    def moves(self, stage: int) -> Iterator[tuple[int, int]]:
        """Yield the nodes of a stage that may move, with the stage to move to."""
        problem, stage_of = self._problem, self._stage_of
        for node in sorted(self._nodes[stage]):
            if stage + 1 < len(self._nodes) and all(stage_of[n] > stage for n in problem.successors[node]):
                yield node, stage + 1
            if stage > 0 and all(stage_of[n] < stage for n in problem.predecessors[node]):
                yield node, stage - 1

    def loads_after(self, node: int, source: int, target: int) -> tuple[float, float, float, int, int, int]:
        """Return the larger load of both stages after a move, both loads, and the move; infinite if it does not fit."""
        problem = self._problem
        here, there = problem.types[self._types[source]], problem.types[self._types[target]]
        if self._bytes[target] + int(problem.bytes[node]) > there.memory:
            return float("inf"), 0.0, 0.0, node, source, target
        less = float(here.seconds[node])
        more = float(there.seconds[node])
        for number in problem.nets_of[node]:
            seconds, size, pins = (
                problem.nets[number].seconds,
                len(problem.nets[number].pins),
                self._pins[number],
            )
            if here.pays:
                less += seconds * ((pins[source] == 1) - (pins[source] == size))
            if there.pays:
                more += seconds * ((pins[target] == 0) - (pins[target] == size - 1))
        after = self.loads[source] - less, self.loads[target] + more
        return max(after), *after, node, source, target

    def move(self, here: float, there: float, node: int, source: int, target: int) -> None:
        """Move a node between two stages, whose loads then are ``here`` and ``there``."""
        self.loads[source], self.loads[target] = here, there
        self._nodes[source].remove(node)
        self._nodes[target].add(node)
        self._stage_of[node] = target
        self._bytes[source] -= int(self._problem.bytes[node])
        self._bytes[target] += int(self._problem.bytes[node])
        for number in self._problem.nets_of[node]:
            self._pins[number][source] -= 1
            self._pins[number][target] += 1

    def split(self) -> Split:
        """Return the cut, without stages that lost all their nodes."""
        used = [stage for stage, members in enumerate(self._nodes) if members]
        renumbered = {stage: index for index, stage in enumerate(used)}
        return Split(
            tuple(renumbered[stage] for stage in self._stage_of), tuple(self._types[stage] for stage in used)
        )
