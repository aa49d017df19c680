"""Says why no cut fits: which nodes are short of how many bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ...cluster import Cluster
from ...units import format_bytes
from .parse import Reading, devices_of_types
from .problem import UNLIMITED, DeviceType, Problem, Split
from .search import Effort, search


class CutDoesNotFit(ValueError):
    """No cut of the graph fits the memory of the devices.

    Attributes:
        nodes: of the stage that lacks most in the cut that comes nearest; those of the whole graph where all devices
            together are too small.
        short_bytes: bytes that it lacks.
    """

    def __init__(self, message: str, nodes: Sequence[Hashable], short_bytes: int) -> None:
        super().__init__(message)
        self.nodes = list(nodes)
        self.short_bytes = short_bytes


def refuse_at_sight(reading: Reading, cluster: Cluster) -> None:
    """Refuses what needs no search: a node larger than each device that may run it, or too many bytes in all.

    Raises:
        CutDoesNotFit: one of both.
    """
    problem = reading.problem
    for index, group in enumerate(reading.members):
        allowed = [kind for kind in problem.types if kind.seconds[index] < float("inf")]
        largest = max(allowed, key=lambda kind: kind.memory)
        short = int(problem.bytes[index]) - largest.memory
        if short > 0:
            what = (
                f"node {group[0]!r} needs"
                if len(group) == 1
                else f"nodes {list(group)!r} stay together and need"
            )
            device = cluster.devices[largest.devices[0]]
            raise CutDoesNotFit(
                f"nothing fits: {what} {problem.bytes[index]} bytes, and the largest device that may run them, "
                f"{device.name!r}, holds {largest.memory}: {short} bytes short ({format_bytes(short)})",
                group,
                short,
            )
    total, room = int(problem.bytes.sum()), sum(kind.memory * len(kind.devices) for kind in problem.types)
    if total > room:
        raise CutDoesNotFit(
            f"nothing fits: the graph needs {total} bytes and the {problem.device_count} devices hold {room} together: "
            f"{total - room} bytes short ({format_bytes(total - room)})",
            [node for group in reading.members for node in group],
            total - room,
        )


def nearest(reading: Reading, cluster: Cluster) -> CutDoesNotFit:
    """Why nothing fits, told by the cut whose largest shortage is smallest."""
    problem = reading.problem

    def attempt(extra: int) -> Split | None:
        return search(replace(problem, types=_with_more(problem, extra)), Effort(), any_will_do=True).split

    low, high = 0, int(problem.bytes.sum())
    split = attempt(high)
    if split is None:
        return CutDoesNotFit(
            "nothing fits: whatever the memory, no order of the devices lets each node run on one that may run it",
            [node for group in reading.members for node in group],
            0,
        )
    while high - low > 1:
        middle = (low + high) // 2
        found = attempt(middle)
        if found:
            split, high = found, middle
        else:
            low = middle
    return _told(reading, cluster, split)


def _with_more(problem: Problem, extra: int) -> tuple[DeviceType, ...]:
    return tuple(replace(kind, memory=min(kind.memory + extra, UNLIMITED)) for kind in problem.types)


def _told(reading: Reading, cluster: Cluster, split: Split) -> CutDoesNotFit:
    problem = reading.problem
    stages = split.stages
    lacks = [
        int(problem.bytes[nodes].sum()) - problem.types[kind].memory
        for nodes, kind in zip(stages, split.types, strict=True)
    ]
    stage = max(range(len(lacks)), key=lacks.__getitem__)
    nodes = [node for index in stages[stage] for node in reading.members[index]]
    device = devices_of_types(cluster, problem.types, split.types)[stage]
    run = repr(nodes[0]) if len(nodes) == 1 else f"{nodes[0]!r} to {nodes[-1]!r} ({len(nodes)} nodes)"
    return CutDoesNotFit(
        f"nothing fits: in the cut that comes nearest, stage {stage}, {run}, needs "
        f"{int(problem.bytes[stages[stage]].sum())} bytes on {device.name!r}, which holds {device.memory_bytes}: "
        f"{lacks[stage]} bytes short ({format_bytes(lacks[stage])})",
        nodes,
        lacks[stage],
    )
