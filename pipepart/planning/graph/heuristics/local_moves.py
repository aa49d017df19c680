"""Improves a cut by moving single nodes to the previous or the next stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..problem import Problem, Split

MOST_MOVES = 2000


def improve_by_moves(problem: Problem, split: Split) -> Split:
    """Improve a cut by hill climbing: move nodes off the most loaded stage while that lowers the larger of both loads.

    A move between neighbours changes only the loads of these two stages: every other stage cuts the same tensors as
    before. Each step takes O(nodes of the stage × pins of the two stages).
    """
    stage_of = list(split.stage_of)
    types = [problem.types[device_type] for device_type in split.types]
    nodes = [set(members) for members in split.stages]
    loads = [problem.stage_seconds(members, kind) for members, kind in zip(nodes, types, strict=True)]
    for _ in range(MOST_MOVES):
        worst = max(range(len(loads)), key=loads.__getitem__)
        best: tuple[float, float, float, int, int] | None = None
        for node, target in _moves(problem, nodes[worst], stage_of, len(types)):
            if problem.bytes[[node, *nodes[target]]].sum() > types[target].memory:
                continue
            here = problem.stage_seconds(nodes[worst] - {node}, types[worst])
            there = problem.stage_seconds(nodes[target] | {node}, types[target])
            if max(here, there) < loads[worst] * (1 - 1e-12):
                found = (max(here, there), here, there, node, target)
                best = found if best is None else min(best, found)
        if best is None:
            break
        _, loads[worst], loads[best[4]], node, target = best
        nodes[worst].remove(node)
        nodes[target].add(node)
        stage_of[node] = target
    used = [stage for stage, members in enumerate(nodes) if members]
    renumbered = {stage: index for index, stage in enumerate(used)}
    return Split(tuple(renumbered[stage] for stage in stage_of), tuple(split.types[stage] for stage in used))


def _moves(
    problem: Problem, members: Collection[int], stage_of: list[int], stages: int
) -> Iterator[tuple[int, int]]:
    """Yield the nodes of a stage that may move, with the stage to move to."""
    for node in sorted(members):
        here = stage_of[node]
        if here + 1 < stages and all(stage_of[other] > here for other in problem.successors[node]):
            yield node, here + 1
        if here > 0 and all(stage_of[other] < here for other in problem.predecessors[node]):
            yield node, here - 1
