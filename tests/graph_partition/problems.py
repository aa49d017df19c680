"""Random graphs and clusters for property tests."""

from __future__ import annotations

import random

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
