"""Cuts are optimal: compared with all cuts of small graphs, and with proven optima of published graphs."""

import math
import re

import networkx as nx
import pytest

from benchmarks.planning import chain, inception, nasnet, tangled
from pipepart.cluster import Cluster
from pipepart.graph_partition.parse import parse
from pipepart.planning import Cut, cut
from tests.graph_partition import oracle
from tests.graph_partition.instances import Instance, placement, profile, reference
from tests.graph_partition.problems import random_problem
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
