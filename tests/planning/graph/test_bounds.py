"""What is said of a cut that is not proven holds: no cut beats its bound, whatever the search was allowed to do."""

import math
import tracemalloc

import networkx as nx
import pytest

from benchmarks.planning import inception, nasnet, tangled
from pipepart.cluster import Cluster
from pipepart.planning import Cut, cut
from pipepart.planning.graph.crossing_bound import CrossingBound
from pipepart.planning.graph.exact.reachability import Reachability
from pipepart.planning.graph.parse import parse
from pipepart.planning.graph.search import Effort, search, simple_lower_bound
from tests.planning.graph import oracle
from tests.planning.graph.problems import random_graph, random_problem


@pytest.mark.parametrize("seed", range(75))
def test_a_search_that_may_keep_next_to_nothing_has_an_honest_bound(seed: int):
    graph, cluster, tensors = random_problem(seed)
    best = oracle.best(graph, cluster, tensors)
    if math.isinf(best):
        return
    problem = parse(graph, cluster, tensors, "cpu").problem
    found = search(problem, Effort(sets=1))
    assert found.lower_bound <= best * (1 + 1e-9)
    assert found.split is None or found.split.bottleneck(problem) >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_minimum_cuts_bound_what_the_search_proves(seed: int):
    graph, cluster = random_graph(2 * seed + 1, 40), Cluster.parse(["1GB"] * (2 + seed % 4))
    found = cut(graph, cluster)
    problem = parse(graph, cluster, None, "cpu").problem
    low = simple_lower_bound(problem)
    bound = CrossingBound(problem).bound(low, 2 * found.bottleneck)
    assert found.optimal
    assert low <= bound <= found.bottleneck * (1 + 1e-9)


def test_minimum_cuts_know_that_each_border_is_crossed():
    # Twenty diamonds in a row, 30 seconds of work; whatever the border, a tensor of 1 second crosses it.
    graph = nx.DiGraph()
    for index in range(60):
        graph.add_node(index, seconds=0.5, transfer_seconds=1.0)
    for start in range(0, 58, 3):
        graph.add_edges_from([(start, start + 1), (start, start + 2), (start + 1, start + 2)])
        graph.add_edges_from([(start + 2, start + 3)] if start + 3 < 60 else [])
    problem = parse(graph, Cluster.parse(["1GB"] * 2), None, "cpu").problem
    bound = CrossingBound(problem).bound(simple_lower_bound(problem), 100.0)
    assert 15.5 < bound <= 16.0


def test_reachability_of_a_large_graph_is_kept_as_bits():
    layers = 4000
    problem = parse(inception(layers), Cluster.parse(["1GB"] * 4), None, "cpu").problem
    tracemalloc.start()
    before, _ = Reachability(problem, 0, len(problem)).summed(problem.work)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < layers**2 / 2  # a byte a pair would be twice that, a float 16 times
    ancestors = nx.ancestors(inception(layers), layers // 2)
    assert before[layers // 2] == pytest.approx(sum(problem.work[node] for node in (layers // 2, *ancestors)))


def topological_orders(graph: nx.DiGraph) -> list[list]:
    """Execution order, depth first, and breadth first."""
    depth = list(reversed(list(nx.dfs_postorder_nodes(graph))))
    return [list(graph), depth, [node for layer in nx.topological_generations(graph) for node in layer]]


def best_of_orders(graph: nx.DiGraph, cluster: Cluster) -> float:
    """The best cut of a few topological orders: proven for each, since an order is a chain with skips."""
    found = math.inf
    for order in topological_orders(graph):
        chain = nx.DiGraph()
        chain.add_nodes_from((node, graph.nodes[node]) for node in order)
        nx.add_path(chain, order)
        tensors = [(graph.nodes[node]["transfer_seconds"], [node, *graph[node]]) for node in graph]
        found = min(found, cut(chain, cluster, tensors).bottleneck)
    return found


def check_on_a_huge_lattice(graph: nx.DiGraph, devices: int) -> Cut:
    cluster = Cluster.parse(["1TB"] * devices)
    found = cut(graph, cluster)
    assert oracle.check(graph, cluster, None, found) == pytest.approx(found.bottleneck, rel=1e-12)
    assert 0 < found.lower_bound <= found.bottleneck
    assert found.bottleneck <= best_of_orders(graph, cluster) * (1 + 1e-12)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "gap"), [(2, 0.01), (4, 0.06), (8, 0.25)])
def test_a_network_of_cells_is_cut_better_than_any_of_its_orders(devices: int, gap: float):
    assert check_on_a_huge_lattice(nasnet(18), devices).gap < gap


@pytest.mark.slow
def test_a_tangle_is_cut_better_than_any_of_its_orders():
    check_on_a_huge_lattice(tangled(500), 8)


def test_without_time_there_is_a_cut_and_its_gap():
    graph, cluster = tangled(120), Cluster.parse(["1TB"] * 4)
    found = cut(graph, cluster, seconds=0.0)
    assert oracle.check(graph, cluster, None, found) == pytest.approx(found.bottleneck, rel=1e-12)
    assert not found.optimal
    assert found.gap == pytest.approx(found.bottleneck / found.lower_bound - 1)
