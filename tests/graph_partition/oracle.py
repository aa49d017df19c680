"""Random small problems, and from the definitions the cost of a cut and the best of all cuts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Iterable, Sequence
from functools import cache

import networkx as nx

from pipepart.cluster import Cluster, Device

Problem = tuple[nx.DiGraph, Cluster, list[tuple[float, list[str]]] | None]


def random_problem(seed: int, most_nodes: int = 7, *, chain: bool = False) -> Problem:
    """A small graph with tensors of any shape, ties and zeros, on up to four devices alike or not."""
    draw = random.Random(seed)
    kinds = draw.choice([["a"], ["a"], ["a", "b"], ["gpu", "cpu"]])
    count = draw.randint(1, most_nodes)
    names = [f"n{index}" for index in range(count)]
    graph = nx.DiGraph()
    whole = draw.random() < 0.5
    for name in names:
        graph.add_node(
            name,
            seconds=_seconds(draw, kinds, whole),
            bytes=draw.choice([0, draw.randint(0, 9)]),
            transfer_seconds=_number(draw, whole) * draw.choice([0, 0.3, 1]),
        )
        if draw.random() < 0.12:
            graph.nodes[name]["together"] = draw.choice("xy")
    density = draw.choice([0.15, 0.3, 0.6])
    for i in range(count):
        for j in range(i + 1, count):
            if j == i + 1 if chain else draw.random() < density:
                graph.add_edge(names[i], names[j])
    tensors = None
    if draw.random() < 0.3:
        count_of = draw.randint(0, 6)
        tensors = [
            (_number(draw, whole), draw.sample(names, draw.randint(1, count))) for _ in range(count_of)
        ]
    return graph, _cluster(draw, kinds, graph), tensors


def _number(draw: random.Random, whole: bool) -> float:
    return float(draw.randint(0, 6)) if whole else draw.choice([0.0, draw.uniform(0, 6)])


def _seconds(draw: random.Random, kinds: list[str], whole: bool) -> float | dict[str, float]:
    if len(kinds) == 1 or draw.random() < 0.2:
        return _number(draw, whole)
    given = {kind: _number(draw, whole) for kind in kinds if draw.random() < 0.85}
    return given or {kinds[0]: _number(draw, whole)}


def _cluster(draw: random.Random, kinds: list[str], graph: nx.DiGraph) -> Cluster:
    total = sum(data["bytes"] for _, data in graph.nodes(data=True))
    devices = []
    for index in range(draw.randint(1, 4)):
        kind = kinds[index] if index < len(kinds) else draw.choice(kinds)
        cap = draw.choice([None, None, max(1, draw.randint(total // 4, max(1, total)))])
        devices.append(
            Device(name=f"d{index}", kind=kind, memory_bytes=cap, speed=draw.choice([1.0, 1.0, 0.5, 2.0]))
        )
    return Cluster(devices=tuple(devices))


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
