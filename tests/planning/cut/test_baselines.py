"""No cut of the partitioners that people use today is better than ours."""

import random

import networkx as nx
import pytest

from pipepart.cluster import Cluster
from pipepart.planning import cut
from tests.planning.cut import oracle
from tests.planning.cut.baselines import balanced_blocks, partition_balanced


def random_graph(seed: int, layers: int) -> nx.DiGraph:
    """A chain, with skips in every other graph, and costs of three orders of magnitude."""
    draw = random.Random(seed)
    graph = nx.path_graph(layers, create_using=nx.DiGraph)
    for layer in graph:
        graph.nodes[layer].update(
            seconds=10 ** draw.uniform(-2, 1), transfer_seconds=draw.choice([0, draw.uniform(0, 3)])
        )
    if seed % 2:
        for _ in range(layers // 3):
            first, last = sorted(draw.sample(range(layers), 2))
            graph.add_edge(first, last)
    return graph


def check_against_baselines(seed: int, layers: int) -> None:
    graph = random_graph(seed, layers)
    parts = 2 + seed % 5
    cluster = Cluster.parse(["1GB"] * parts)
    found = cut(graph, cluster)
    costs = [graph.nodes[layer]["seconds"] for layer in graph]
    for baseline in (balanced_blocks, partition_balanced):
        stage_of = baseline(costs, parts)
        stages = [
            [layer for layer in graph if stage_of[layer] == stage] for stage in range(max(stage_of) + 1)
        ]
        touched = oracle.nets(graph, None)
        loads = [oracle.load(graph, touched, stage, cluster.devices[0], free=False) for stage in stages]
        assert found.bottleneck <= max(loads) * (1 + 1e-12)


@pytest.mark.parametrize("block", range(4))
def test_never_worse_than_balanced_blocks_or_balanced_sums(block: int):
    for seed in range(25 * block, 25 * block + 25):
        check_against_baselines(seed, layers=10 + seed % 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_never_worse_than_balanced_blocks_or_balanced_sums_on_a_thousand_graphs():
    for seed in range(1000, 2000):
        check_against_baselines(seed, layers=10 + seed % 40)
