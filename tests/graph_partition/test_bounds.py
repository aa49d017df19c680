"""What is said of a cut that is not proven holds: no cut beats its bound, whatever the search was allowed to do."""

import math
import tracemalloc

import networkx as nx
import pytest

from benchmarks.planning import inception, nasnet, tangled
from pipepart.cluster import Cluster
from pipepart.graph_partition.exact.reachability import Reachability
from pipepart.graph_partition.parse import parse
from pipepart.graph_partition.search import Effort, search
from pipepart.planning import Cut, cut
from schedules.searching.clock import Clock
from tests.graph_partition import oracle
from tests.graph_partition.problems import random_problem


@pytest.mark.parametrize("seed", range(12))
def test_a_search_that_may_keep_next_to_nothing_has_an_honest_bound(seed: int):
    graph, cluster, tensors = random_problem(seed)
    best = oracle.best(graph, cluster, tensors)
    if math.isinf(best):
        return
    problem = parse(graph, cluster, tensors, "cpu").problem
    found = search(problem, Effort(sets=1))
    assert found.lower_bound <= best * (1 + 1e-9)
    assert found.split is None or found.split.bottleneck(problem) >= best * (1 - 1e-9)


def test_reachability_of_a_large_graph_is_kept_as_bits():
    layers = 4000
    problem = parse(inception(layers), Cluster.parse(["1GB"] * 4), None, "cpu").problem
    tracemalloc.start()
    behind = Reachability(problem, 0, len(problem)).work_behind(problem.work, Clock())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < layers**2 / 2  # a byte a pair would be twice that, a float 16 times
    later = nx.descendants(inception(layers), layers // 2)
    assert behind[layers // 2] == pytest.approx(sum(problem.work[node] for node in (layers // 2, *later)))


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
@pytest.mark.parametrize(("devices", "gap"), [(2, 0.0001), (4, 0.25), (8, 0.8)])
def test_a_network_of_cells_is_cut_better_than_any_of_its_orders(devices: int, gap: float):
    assert check_on_a_huge_lattice(nasnet(18), devices).gap < gap


@pytest.mark.slow
def test_a_tangle_is_cut_better_than_any_of_its_orders():
    found = check_on_a_huge_lattice(tangled(500), 8)
    assert found.optimal == (found.gap == 0)


def test_without_time_there_is_a_cut_and_its_gap():
    graph, cluster = tangled(120), Cluster.parse(["1TB"] * 4)
    found = cut(graph, cluster, seconds=0.0)
    assert oracle.check(graph, cluster, None, found) == pytest.approx(found.bottleneck, rel=1e-12)
    assert not found.optimal
    assert found.gap == pytest.approx(found.bottleneck / found.lower_bound - 1)


class StepClock(Clock):
    """A clock that is over after a number of looks at it, so that the test does not depend on the machine."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def has(self, seconds: float) -> bool:
        self.looks -= 1
        return self.looks >= 0


@pytest.mark.parametrize("seed", range(6))
def test_whenever_the_clock_stops_the_search_its_cut_and_bound_are_honest(seed: int):
    graph, cluster, tensors = random_problem(2 * seed)
    best = oracle.best(graph, cluster, tensors)
    if math.isinf(best):
        return
    problem = parse(graph, cluster, tensors, "cpu").problem
    for looks in range(0, 40, 3):
        found = search(problem, Effort(clock=StepClock(looks)))
        assert found.lower_bound <= best * (1 + 1e-9)
        assert found.split is None or found.split.bottleneck(problem) >= best * (1 - 1e-9)
        if found.optimal:
            assert found.split is not None
            assert found.split.bottleneck(problem) == pytest.approx(best)


def grid(side: int) -> nx.DiGraph:
    graph = nx.DiGraph(nx.grid_2d_graph(side, side).to_directed().edges)
    graph.remove_edges_from([edge for edge in graph.edges if edge[0] > edge[1]])
    return graph


@pytest.mark.parametrize(
    "graph", [nx.empty_graph(80, nx.DiGraph), nx.path_graph(200, nx.DiGraph), grid(10)], ids=str
)
def test_every_step_of_the_search_looks_at_the_clock(graph: nx.DiGraph):
    # Between two looks there is no loop over more than the nodes of the graph.
    for number, node in enumerate(graph):
        graph.nodes[node].update(seconds=1 + number % 7 / 10, transfer_seconds=number % 5 / 10)
    problem = parse(graph, Cluster.parse(["1GB"] * 4), None, "cpu").problem
    clock = StepClock(300)
    found = search(problem, Effort(clock=clock))
    assert found.split is not None
    assert clock.looks > -20  # once the clock is over the search ends; it does not go on to another step
