"""Cuts are optimal, or have a lower bound that no cut beats: compared with all cuts, and with published optima."""

import math
import re

import networkx as nx
import pytest

from benchmarks.planning import chain, inception, nasnet, tangled
from pipepart.cluster import Cluster
from pipepart.graph_partition.parse import parse
from pipepart.graph_partition.search import search
from pipepart.planning import Cut, cut
from schedules.searching.clock import Clock
from tests.graph_partition import oracle
from tests.graph_partition.instances import Instance, placement, profile, reference
from tests.graph_partition.oracle import random_problem
from tests.support.seeds import seeds


def check_against_every_cut(seed: int, *, chain: bool = False) -> None:
    graph, cluster, tensors = random_problem(seed, chain=chain)
    best = oracle.best(graph, cluster, tensors)
    if math.isinf(best):
        with pytest.raises(ValueError, match=r"nothing fits|no device of the cluster"):
            cut(graph, cluster, tensors)
        return
    found = cut(graph, cluster, tensors)
    assert found.optimal
    assert found.bottleneck == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert oracle.check(graph, cluster, tensors, found) == pytest.approx(
        found.bottleneck, rel=1e-9, abs=1e-12
    )
    assert found.lower_bound <= found.bottleneck


def test_graphs_and_chains_are_cut_as_well_as_they_can_be():
    for seed in range(60):
        check_against_every_cut(seed, chain=seed % 3 == 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(2))
def test_hundreds_of_graphs_are_cut_as_well_as_they_can_be(block: int):
    for seed in seeds(300, f"graphs {block}"):
        check_against_every_cut(seed, chain=seed % 5 == 0)


@pytest.mark.parametrize("seed", [622975411, 868150760])
def test_a_sum_that_rounds_up_does_not_make_a_chain_impossible(seed: int):
    check_against_every_cut(seed, chain=True)


def test_the_same_arguments_give_the_same_cut():
    graph, cluster, tensors = random_problem(3)
    assert cut(graph, cluster, tensors) == cut(graph, cluster, tensors)


def with_free_inputs(layers: int) -> nx.DiGraph:
    """A chain whose layers each have an input that costs nothing, listed after all layers."""
    graph = nx.path_graph(layers, nx.DiGraph)
    for layer in range(layers):
        graph.nodes[layer].update(seconds=1.0 + layer % 3, transfer_seconds=0.5)
        graph.add_node(f"input {layer}", seconds=0.0)
        graph.add_edge(f"input {layer}", layer)
    return graph


def test_nodes_that_cost_nothing_stand_before_the_only_layer_that_uses_them():
    graph, cluster = with_free_inputs(40), Cluster.parse(["24GiB"] * 4)
    assert len(parse(graph, cluster, None, "cpu").problem) == 40  # of 2 ** 40 downsets and more
    found = checked(graph, 4)
    assert found.optimal
    order = [node for stage in found.stages for node in stage]
    assert all(order.index(before) < order.index(after) for before, after in graph.edges)


def test_a_node_that_costs_nothing_stays_free_if_another_layer_uses_its_tensor():
    graph, cluster = with_free_inputs(3), Cluster.parse(["24GiB"] * 3)
    tensors = [(1.5, ["input 0", 2]), (0.2, ["input 1", 1]), (0.5, [0, 1, 2])]
    found = cut(graph, cluster, tensors)
    assert found.optimal
    assert found.bottleneck == pytest.approx(oracle.best(graph, cluster, tensors))


PLACEMENT = [(name, with_cpu) for name in reference()["placement"] for with_cpu in (False, True)]
PROFILES = [(name, cell) for name, cells in reference()["profiles"].items() for cell in cells]


def check(instance: Instance, best: float) -> None:
    found: Cut = cut(instance.graph, instance.cluster, instance.tensors)
    assert found.optimal
    assert found.bottleneck == pytest.approx(best, rel=1e-6)
    value = oracle.check(instance.graph, instance.cluster, instance.tensors, found)
    assert found.bottleneck == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("name", "with_cpu"), PLACEMENT)
def test_placement_instances_reach_their_optimum(name: str, with_cpu: bool):
    best = reference()["placement"][name]["max_load_with_one_cpu" if with_cpu else "max_load"]
    check(placement(name, with_cpu=with_cpu), best)


@pytest.mark.parametrize(("name", "cell"), PROFILES)
def test_profiles_reach_their_optimum(name: str, cell: str):
    devices, gigabits = map(int, re.findall(r"\d+", cell))
    check(profile(name, devices, gigabits), reference()["profiles"][name][cell])


def checked(graph: nx.DiGraph, devices: int) -> Cut:
    cluster = Cluster.parse(["24GiB"] * devices)
    found = cut(graph, cluster)
    assert oracle.check(graph, cluster, None, found) == pytest.approx(found.bottleneck, rel=1e-12)
    return found


@pytest.mark.slow
def test_ten_thousand_layers_over_sixty_four_devices_are_proven():
    assert checked(chain(10_000), 64).optimal


@pytest.mark.slow
def test_two_thousand_layers_in_modules_are_proven():
    assert checked(inception(2000), 16).optimal


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "gap"), [(2, 0.0001), (4, 0.3)])
def test_a_network_of_cells_is_cut_near_its_bound(devices: int, gap: float):
    assert checked(nasnet(18), devices).gap < gap


@pytest.mark.slow
def test_a_tangle_has_an_honest_bound():
    found = checked(tangled(500), 8)
    assert 0 < found.lower_bound <= found.bottleneck
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


@pytest.mark.parametrize("seed", range(12))
def test_whatever_stops_the_search_its_cut_and_bound_are_honest(seed: int):
    """A clock after a few looks, or no room to keep more than one set of nodes."""
    graph, cluster, tensors = random_problem(seed)
    best = oracle.best(graph, cluster, tensors)
    if math.isinf(best):
        return
    problem = parse(graph, cluster, tensors, "cpu").problem
    limits = [{"clock": StepClock(looks)} for looks in range(0, 40, 3)]
    for limit in [{"clock": Clock(), "most_sets": 1}, *limits]:
        found = search(problem, **limit)
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
