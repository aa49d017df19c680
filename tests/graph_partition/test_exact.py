"""Cuts are optimal: compared with all cuts, an integer program, and proven optima of published graphs."""

import math
import re
from typing import Any

import networkx as nx
import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.planning import chain, inception, nasnet, tangled
from pipepart.cluster import Cluster
from pipepart.planning import Cut, cut
from tests.graph_partition import oracle
from tests.graph_partition.instances import Instance, placement, profile, reference
from tests.graph_partition.problems import random_graph, random_problem
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


class IntegerProgram:
    """Like devices without limits: which stages have begun before each node is what is chosen.

    Variables, all in [0, 1] but the last: ``z[v, s]``, whether node v is in one of the first s + 1 stages (integer);
    for each tensor and stage the ``most`` and the ``least`` membership of its pins; and the bottleneck.
    """

    def __init__(self, graph: nx.DiGraph, tensors: oracle.Tensors | None, stages: int) -> None:
        self.graph, self.stages = graph, stages
        self.nodes = {node: index for index, node in enumerate(graph)}
        nets = [(seconds, [self.nodes[pin] for pin in pins]) for seconds, pins in oracle.nets(graph, tensors)]
        self.nets = [(seconds, pins) for seconds, pins in nets if seconds > 0 and len(pins) > 1]
        self.chosen = len(self.nodes) * (stages - 1)
        self.size = self.chosen + 2 * len(self.nets) * stages + 1
        self.rows: list[dict[int, float]] = []
        self.limits: list[float] = []
        self._keep_the_order()
        for stage in range(stages):
            self._bound_the_load(stage)

    def solve(self) -> float:
        """The smallest bottleneck."""
        matrix = np.zeros((len(self.rows), self.size))
        for index, row in enumerate(self.rows):
            matrix[index, list(row)] = list(row.values())
        objective = np.zeros(self.size)
        objective[-1] = 1
        upper: Any = np.append(np.ones(self.size - 1), np.inf)
        limits: Any = np.array(self.limits)
        solved = milp(
            objective,
            constraints=LinearConstraint(matrix, ub=limits),
            integrality=(np.arange(self.size) < self.chosen).astype(float),
            bounds=Bounds(0.0, upper),
            options={"mip_rel_gap": 0.0},
        )
        assert solved.success
        return float(solved.fun)

    def _at_most(self, row: dict[int, float], limit: float) -> None:
        self.rows.append(row)
        self.limits.append(limit)

    def _member(self, node: int, stage: int, sign: float) -> tuple[dict[int, float], float]:
        """``sign`` times the membership of a node in a stage, as coefficients and a constant."""
        row: dict[int, float] = {}
        if stage < self.stages - 1:
            row[node * (self.stages - 1) + stage] = sign
        if stage > 0:
            row[node * (self.stages - 1) + stage - 1] = -sign
        return row, sign if stage == self.stages - 1 else 0.0

    def _keep_the_order(self) -> None:
        borders = self.stages - 1
        for node in range(len(self.nodes)):
            for stage in range(borders - 1):
                self._at_most({node * borders + stage: 1.0, node * borders + stage + 1: -1.0}, 0.0)
        for before, after in graph_edges(self.graph, self.nodes):
            for stage in range(borders):
                self._at_most({after * borders + stage: 1.0, before * borders + stage: -1.0}, 0.0)

    def _bound_the_load(self, stage: int) -> None:
        load: dict[int, float] = {self.size - 1: -1.0}
        constant = 0.0
        for node, index in self.nodes.items():
            row, offset = self._member(index, stage, self.graph.nodes[node]["seconds"])
            load.update(row)
            constant += offset
        for number, (seconds, pins) in enumerate(self.nets):
            most = self.chosen + 2 * (number * self.stages + stage)
            load[most], load[most + 1] = seconds, -seconds
            for pin in pins:
                row, offset = self._member(pin, stage, 1.0)
                self._at_most({**row, most: -1.0}, -offset)
                row, offset = self._member(pin, stage, -1.0)
                self._at_most({**row, most + 1: 1.0}, -offset)
        self._at_most(load, -constant)


def graph_edges(graph: nx.DiGraph, nodes: dict) -> list[tuple[int, int]]:
    return [(nodes[before], nodes[after]) for before, after in graph.edges]


def smallest_bottleneck(graph: nx.DiGraph, tensors: oracle.Tensors | None, stages: int) -> float:
    return IntegerProgram(graph, tensors, stages).solve()


@pytest.mark.parametrize("seed", range(2))
def test_an_integer_program_agrees(seed: int):
    graph = random_graph(seed, layers=12)
    found = cut(graph, Cluster.parse(["1GB"] * 3))
    assert found.bottleneck == pytest.approx(smallest_bottleneck(graph, None, 3), rel=1e-6)


@pytest.mark.slow
def test_an_integer_program_agrees_on_a_published_graph():
    instance = placement("layers_bert24_inference", with_cpu=False)
    for node in instance.graph:
        instance.graph.nodes[node]["seconds"] = instance.graph.nodes[node]["seconds"]["fpga"]
    found = cut(instance.graph, Cluster.parse(["1TB"] * 6), instance.tensors)
    assert found.bottleneck == pytest.approx(
        smallest_bottleneck(instance.graph, instance.tensors, 6), rel=1e-6
    )


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
