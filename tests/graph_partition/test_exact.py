"""The cut is the best there is: against every cut there is, on random graphs and unlike devices."""

import math

import pytest

from pipepart.planning import cut
from tests.graph_partition import oracle
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


@pytest.mark.parametrize("block", range(5))
def test_graphs_are_cut_as_well_as_they_can_be(block: int):
    for seed in range(40 * block, 40 * block + 40):
        check_against_every_cut(seed)


def test_chains_are_cut_as_well_as_they_can_be():
    for seed in range(60):
        check_against_every_cut(seed, chain=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(4))
def test_thousands_of_graphs_are_cut_as_well_as_they_can_be(block: int):
    for seed in seeds(600, f"graphs {block}"):
        check_against_every_cut(seed, chain=seed % 5 == 0)


@pytest.mark.parametrize("seed", [622975411, 868150760])
def test_a_sum_that_rounds_up_does_not_make_a_chain_impossible(seed: int):
    check_against_every_cut(seed, chain=True)


def test_the_same_arguments_give_the_same_cut():
    graph, cluster, tensors = random_problem(3)
    assert cut(graph, cluster, tensors) == cut(graph, cluster, tensors)
