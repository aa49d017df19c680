"""The lower bound of an unproven cut holds: no cut beats it, for any budget of the search."""

import math

import networkx as nx
import pytest

from benchmarks.planning import tangled
from pipepart.cluster import Cluster
from pipepart.graph_partition.parse import parse
from pipepart.graph_partition.search import search
from pipepart.planning import cut
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
    found = search(problem, Clock(), most_sets=1)
    assert found.lower_bound <= best * (1 + 1e-9)
    assert found.split is None or found.split.bottleneck(problem) >= best * (1 - 1e-9)


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
        found = search(problem, StepClock(looks))
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
    found = search(problem, clock)
    assert found.split is not None
    assert clock.looks > -20  # once the clock is over the search ends; it does not go on to another step
