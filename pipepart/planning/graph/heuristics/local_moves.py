"""Improves a cut by moving single nodes to the previous or the next stage."""

from __future__ import annotations

from ..problem import Problem, Split

MOST_MOVES = 2000


def improve_by_moves(problem: Problem, split: Split) -> Split:
    """Improve a cut by hill climbing: move nodes off the most loaded stage while that lowers the larger of both loads.

    A move between neighbours changes only the loads of these two stages: every other stage cuts the same tensors as
    before. Each step takes O(nodes of the stage × pins of the two stages).
    """
    stage_of, types = list(split.stage_of), split.types
    nodes = [set(members) for members in split.stages]
    loads = [
        problem.stage_seconds(members, problem.types[device_type])
        for members, device_type in zip(nodes, types, strict=True)
    ]
    for _ in range(MOST_MOVES):
        worst = max(range(len(loads)), key=loads.__getitem__)
        best: tuple[float, float, float, int, int] | None = None
        for node in _movable(problem, nodes[worst]):
            for target in _targets(problem, node, stage_of, len(types)):
                device_type = problem.types[types[target]]
                if (
                    sum(int(problem.bytes[other]) for other in nodes[target]) + problem.bytes[node]
                    > device_type.memory
                ):
                    continue
                here = problem.stage_seconds(nodes[worst] - {node}, problem.types[types[worst]])
                there = problem.stage_seconds(nodes[target] | {node}, device_type)
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
    return Split(tuple(renumbered[stage] for stage in stage_of), tuple(types[stage] for stage in used))


def _movable(problem: Problem, members: set[int]) -> list[int]:
    """Return the nodes at a border of their stage: without a predecessor in it, or without a successor in it."""
    return [
        node
        for node in sorted(members)
        if not any(other in members for other in problem.successors[node])
        or not any(other in members for other in problem.predecessors[node])
    ]


def _targets(problem: Problem, node: int, stage_of: list[int], stages: int) -> list[int]:
    here = stage_of[node]
    found = []
    if here + 1 < stages and all(stage_of[other] > here for other in problem.successors[node]):
        found.append(here + 1)
    if here > 0 and all(stage_of[other] < here for other in problem.predecessors[node]):
        found.append(here - 1)
    return found
