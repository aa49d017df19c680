"""CutDoesNotFit: the error when no cut fits the memory of the devices, with the nodes and the missing bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from schedules.searching.clock import Clock

from ..cluster import Cluster
from ..input_error import InputError
from ..units import format_bytes
from .parse import ParsedGraph
from .problem import UNLIMITED, Problem, Split
from .search import Effort, SearchResult, search


class CutDoesNotFit(InputError):
    """No cut of the graph fits the memory of the devices.

    Attributes:
        nodes: the nodes of the stage that lacks the most memory, in the cut with the smallest such shortage; all nodes
            if the total memory is too small.
        short_bytes: number of bytes that the stage lacks.
    """

    def __init__(self, message: str, nodes: Sequence[Hashable], short_bytes: int) -> None:
        super().__init__(message)
        self.nodes = list(nodes)
        self.short_bytes = short_bytes


def check_memory(parsed: ParsedGraph, cluster: Cluster) -> None:
    """Check without a search that each node fits some device that may run it, and that all nodes fit all devices.

    Raises:
        CutDoesNotFit: a node or the whole graph is too large.
    """
    problem = parsed.problem
    for index, group in enumerate(parsed.members):
        allowed = [device_type for device_type in problem.types if device_type.seconds[index] < float("inf")]
        largest = max(allowed, key=lambda device_type: device_type.memory)
        short = int(problem.bytes[index]) - largest.memory
        if short > 0:
            alone = len(group) == 1
            what = f"node {group[0]!r} needs" if alone else f"nodes {list(group)!r} stay together and need"
            device = cluster.devices[largest.devices[0]]
            raise CutDoesNotFit(
                f"nothing fits: {what} {problem.bytes[index]} bytes, and the largest device that may run them, "
                f"{device.name!r}, holds {largest.memory}: {short} bytes short ({format_bytes(short)})",
                group,
                short,
            )
    total, memory = (
        int(problem.bytes.sum()),
        sum(device_type.memory * len(device_type.devices) for device_type in problem.types),
    )
    if total > memory:
        raise CutDoesNotFit(
            f"nothing fits: the graph needs {total} bytes and the {problem.device_count} devices hold {memory} in all: "
            f"{total - memory} bytes short ({format_bytes(total - memory)})",
            [node for group in parsed.members for node in group],
            total - memory,
        )


def nearest(parsed: ParsedGraph, cluster: Cluster, clock: Clock) -> CutDoesNotFit:
    """Return the error that describes the nearest cut: the cut whose largest memory shortage is smallest.

    Bisects the extra bytes per device that make a cut possible. If the clock runs out, the error describes the nearest
    cut so far and says that another cut may be nearer.
    """
    problem = parsed.problem

    def attempt(extra: int) -> SearchResult:
        types = tuple(
            replace(device_type, memory=min(device_type.memory + extra, UNLIMITED))
            for device_type in problem.types
        )
        return search(replace(problem, types=types), Effort(clock=clock), any_will_do=True)

    low, high = 0, int(problem.bytes.sum())
    result = attempt(high)
    split, proven = result.split, True
    if split is None:
        why = (
            "whatever the memory, no order of the devices lets each node run on one that may run it"
            if result.optimal
            else "and the time given was too short to find what is missing"
        )
        return CutDoesNotFit(
            f"nothing fits: {why}",
            [node for group in parsed.members for node in group],
            0,
        )
    high = max(_shortages(problem, split))
    while high - low > 1 and not clock.is_over:
        middle = (low + high) // 2
        result = attempt(middle)
        if result.split:
            split, high = result.split, max(_shortages(problem, result.split))
        else:
            low, proven = middle, proven and result.optimal
    return _shortage_error(parsed, cluster, split, proven=proven and high - low <= 1)


def _shortages(problem: Problem, split: Split) -> list[int]:
    """Return the bytes that each stage lacks; negative if the stage fits."""
    return [
        int(problem.bytes[nodes].sum()) - problem.types[device_type].memory
        for nodes, device_type in zip(split.stages, split.types, strict=True)
    ]


def _shortage_error(parsed: ParsedGraph, cluster: Cluster, split: Split, *, proven: bool) -> CutDoesNotFit:
    problem = parsed.problem
    shortages = _shortages(problem, split)
    stage = max(range(len(shortages)), key=shortages.__getitem__)
    members = split.stages[stage]
    nodes = [node for index in members for node in parsed.members[index]]
    device = cluster.devices[problem.devices_of(split)[stage]]
    names = repr(nodes[0]) if len(nodes) == 1 else f"{nodes[0]!r} to {nodes[-1]!r} ({len(nodes)} nodes)"
    which = "the nearest cut" if proven else "the nearest cut found in the time given"
    return CutDoesNotFit(
        f"nothing fits: in {which}, stage {stage}, {names}, needs {int(problem.bytes[members].sum())} bytes on "
        f"{device.name!r}, which holds {device.memory_bytes}: {shortages[stage]} bytes short "
        f"({format_bytes(shortages[stage])})",
        nodes,
        shortages[stage],
    )
