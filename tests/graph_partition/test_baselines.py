"""No cut of the partitioners that people use today is better than ours."""

import math
import random
from collections.abc import Hashable

import networkx as nx
import pytest

from pipepart.cluster import Cluster, Device
from pipepart.planning import CutDoesNotFit, cut
from tests.graph_partition import oracle
from tests.graph_partition.baselines import balanced_blocks, partition_balanced, pipedream
from tests.graph_partition.problems import random_graph
from tests.support.seeds import seeds


def random_case(seed: int) -> tuple[nx.DiGraph, Cluster]:
    """A chain, or a graph of two to four branches side by side, for unlike devices; in every third case with caps."""
    draw = random.Random(seed)
    graph = random_graph(2 * seed, draw.randint(3, 10 if seed % 2 else 25))
    if seed % 2:
        graph.remove_edges_from([edge for edge in list(graph.edges) if draw.random() < 0.15])
        for _ in range(3):
            graph.add_edge(*sorted(draw.sample(range(len(graph)), 2)))
    for layer in graph:
        graph.nodes[layer]["bytes"] = draw.randint(0, 100)
    total = sum(graph.nodes[layer]["bytes"] for layer in graph)
    parts = draw.randint(2, 6)
    caps = [int(total * draw.uniform(1.2, 2) / parts) if seed % 3 == 0 else None for _ in range(parts)]
    speeds = [draw.choice([1.0, 1.0, 2.0, 0.5]) if seed % 4 == 0 else 1.0 for _ in range(parts)]
    devices = [Device(name=f"d{i}", kind="gpu", memory_bytes=cap, speed=speed)
               for i, (cap, speed) in enumerate(zip(caps, speeds, strict=True))]  # fmt: skip
    return graph, Cluster(devices=tuple(devices))


def stages_of(graph: nx.DiGraph, numbers: list[int]) -> list[list[Hashable]]:
    return [
        [layer for layer, stage in zip(graph, numbers, strict=True) if stage == number]
        for number in range(max(numbers) + 1)
    ]


def baselines(graph: nx.DiGraph, parts: int) -> dict[str, list[list[Hashable]]]:
    seconds = [graph.nodes[layer]["seconds"] for layer in graph]
    return {
        "blocks": stages_of(graph, balanced_blocks(seconds, parts)),
        "by seconds": stages_of(graph, partition_balanced(seconds, parts)),
        "by parameters": stages_of(
            graph, partition_balanced([graph.nodes[layer]["bytes"] + 1e-9 for layer in graph], parts)
        ),
        "by type": stages_of(
            graph, partition_balanced([1.0 if index % 3 == 0 else 1e-9 for index in range(len(graph))], parts)
        ),
        "uniform": stages_of(graph, partition_balanced([1.0] * len(graph), parts)),
        "pipedream": pipedream(graph, parts),
    }


def check_against_baselines(seed: int) -> None:
    graph, cluster = random_case(seed)
    touched = oracle.nets(graph, None)
    theirs = {
        name: max(
            oracle.load(graph, touched, stage, device, free=False)
            for stage, device in zip(stages, cluster.devices, strict=False)
        )
        for name, stages in baselines(graph, len(cluster.devices)).items()
    }
    try:
        found = cut(graph, cluster)
    except CutDoesNotFit:
        assert set(theirs.values()) == {math.inf}, theirs
        return
    assert found.optimal
    assert oracle.check(graph, cluster, None, found) == pytest.approx(found.bottleneck, rel=1e-12)
    assert found.bottleneck <= min(theirs.values()) * (1 + 1e-12), theirs
    if len(graph) <= 6:
        assert found.bottleneck == pytest.approx(oracle.best(graph, cluster), rel=1e-9)


@pytest.mark.parametrize("block", range(2))
def test_never_worse_than_other_partitioners(block: int):
    for seed in range(25 * block, 25 * block + 25):
        check_against_baselines(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(2))
def test_never_worse_than_other_partitioners_on_hundreds_of_graphs(block: int):
    for seed in seeds(240, f"baselines {block}"):
        check_against_baselines(seed)
