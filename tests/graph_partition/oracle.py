"""Computes the cost of a cut and the best cut from the definitions, independently of the planner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from functools import cache

import networkx as nx

from pipepart.cluster import Cluster, Device

Tensors = Sequence[tuple[float, Sequence[Hashable]]]
Nets = Sequence[tuple[float, set[Hashable]]]


def nets(graph: nx.DiGraph, tensors: Tensors | None) -> list[tuple[float, set[Hashable]]]:
    """Each tensor with the nodes that touch it."""
    if tensors is not None:
        return [(seconds, set(nodes)) for seconds, nodes in tensors]
    return [(data.get("transfer_seconds", 0), {node, *graph[node]}) for node, data in graph.nodes.items()]


def load(graph: nx.DiGraph, tensors: Nets, stage: Iterable[Hashable], device: Device, free: bool) -> float:
    """Seconds of a stage on a device; infinite where a node may not run there or the bytes do not fit."""
    inside = set(stage)
    if (
        device.memory_bytes is not None
        and sum(graph.nodes[v].get("bytes", 0) for v in inside) > device.memory_bytes
    ):
        return math.inf
    compute = 0.0
    for node in inside:
        seconds = graph.nodes[node]["seconds"]
        if isinstance(seconds, dict):
            seconds = seconds.get(device.kind, math.inf)
        compute += seconds / device.speed
    if free:
        return compute
    return compute + sum(seconds for seconds, pins in tensors if pins & inside and pins - inside)


def hosts(cluster: Cluster) -> set[str]:
    """Kinds of device that tensors cost nothing: the CPU beside accelerators."""
    kinds = {device.kind for device in cluster.devices}
    return {"cpu"} if len(kinds) > 1 else set()


def check(graph: nx.DiGraph, cluster: Cluster, tensors: Tensors | None, cut) -> float:
    """The bottleneck of a cut; fails where the cut is none."""
    assert sorted(map(repr, itertools.chain(*cut.stages))) == sorted(map(repr, graph))
    assert len(cut.stages) == len(cut.devices) == len({device.name for device in cut.devices})
    assert all(device in cluster.devices for device in cut.devices)
    assert all(cut.stages)
    stage_of = {node: index for index, stage in enumerate(cut.stages) for node in stage}
    assert all(stage_of[before] <= stage_of[after] for before, after in graph.edges)
    tied: dict[Hashable, int] = {}
    for node in graph:
        label = graph.nodes[node].get("together")
        assert label is None or tied.setdefault(label, stage_of[node]) == stage_of[node]
    free, touched = hosts(cluster), nets(graph, tensors)
    return max(
        load(graph, touched, stage, device, device.kind in free)
        for stage, device in zip(cut.stages, cut.devices, strict=True)
    )


def best(graph: nx.DiGraph, cluster: Cluster, tensors: Tensors | None = None) -> float:
    """The smallest bottleneck of any cut, infinite where none fits: every set of nodes after every other."""
    nodes = list(graph)
    labels = [graph.nodes[node].get("together") for node in nodes]
    before = [{nodes.index(other) for other in graph.predecessors(node)} for node in nodes]
    free, touched = hosts(cluster), nets(graph, tensors)
    full = frozenset(range(len(nodes)))

    def allowed(inside: frozenset[int]) -> bool:
        closed = all(before[index] <= inside for index in inside)
        apart = {labels[i] for i in inside} & {labels[i] for i in full - inside} - {None}
        return closed and not apart

    sets = [
        inside
        for size in range(len(nodes) + 1)
        for inside in map(frozenset, itertools.combinations(range(len(nodes)), size))
        if allowed(inside)
    ]
    behind = {inside: [larger for larger in sets if inside < larger] for inside in sets}
    kinds = {device.name: (device.kind, device.speed, device.memory_bytes) for device in cluster.devices}

    devices = {kinds[device.name]: device for device in cluster.devices}

    @cache
    def stage(inside: frozenset[int], kind: tuple) -> float:
        device = devices[kind]
        return load(graph, touched, [nodes[i] for i in inside], device, device.kind in free)

    @cache
    def rest(done: frozenset[int], left: tuple) -> float:
        if done == full:
            return 0.0
        found = math.inf
        for kind in set(left):
            fewer = list(left)
            fewer.remove(kind)
            for larger in behind[done]:
                first = stage(larger - done, kind)
                if first < found:
                    found = min(found, max(first, rest(larger, tuple(fewer))))
        return found

    return rest(frozenset(), tuple(sorted(kinds.values(), key=repr)))
