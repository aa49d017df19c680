"""Orders through thin places: topological, through the borders that few tensors cross, with good intervals."""

import networkx as nx
import pytest

from benchmarks.planning import nasnet
from pipepart.cluster import Cluster
from pipepart.planning.graph import cut, thin_orders
from pipepart.planning.graph.exact.intervals import best_order_split
from pipepart.planning.graph.parse import parse
from tests.planning.graph.problems import random_graph, random_problem


def interleaved_towers() -> nx.DiGraph:
    """Two towers of ten layers that run by turns and meet in a head; their tensors are large, and small after five."""
    graph = nx.DiGraph()
    for level in range(10):
        for tower in "ab":
            graph.add_node((tower, level), seconds=1.0, transfer_seconds=0.1 if level in (4, 9) else 5.0)
            if level:
                graph.add_edge((tower, level - 1), (tower, level))
    graph.add_node("head", seconds=0.5)
    graph.add_edges_from([(("a", 9), "head"), (("b", 9), "head")])
    return graph


def test_an_order_passes_through_the_borders_that_little_crosses():
    graph, cluster = interleaved_towers(), Cluster.parse(["1GB"] * 4)
    bottleneck, order = thin_orders(graph, cluster)[0]
    place = {node: index for index, node in enumerate(order)}
    halves = [[(tower, level) for level in range(start, start + 5)] for tower in "ab" for start in (0, 5)]
    assert all(order[start : start + 5] in halves for start in (0, 5, 10, 15))
    assert all(place[before] < place[after] for before, after in graph.edges)
    # Each stage is half a tower, or a little more: at most two small tensors cross each of its borders.
    assert bottleneck == cut(graph, cluster).bottleneck == pytest.approx(5.7)


@pytest.mark.parametrize("seed", range(12))
def test_orders_are_topological_and_hold_each_node_once(seed: int):
    graph, cluster, _ = random_problem(seed)
    for _, order in [*thin_orders(graph, cluster), *thin_orders(random_graph(seed, 30), cluster)]:
        of = graph if set(order) == set(graph) else random_graph(seed, 30)
        place = {node: index for index, node in enumerate(order)}
        assert len(place) == len(order) == len(of)
        groups = {node: of.nodes[node].get("together") for node in of}
        assert all(
            place[before] < place[after]
            for before, after in of.edges
            if groups[before] is None and groups[after] is None
        )


@pytest.mark.parametrize("devices", [4, 8])
def test_cells_are_cut_much_better_along_thin_places_than_in_execution_order(devices: int):
    graph, cluster = nasnet(5), Cluster.parse(["1GB"] * devices)
    problem = parse(graph, cluster, None, None).problem
    in_order = best_order_split(problem, range(len(problem)))
    assert in_order is not None
    best = min(bottleneck for bottleneck, _ in thin_orders(graph, cluster))
    assert best < 0.65 * in_order.bottleneck(problem)
