"""Large graphs: chains and modules are proven in seconds, tangles get a better cut than any order's and a bound."""

import networkx as nx
import pytest

from benchmarks.planning import chain, inception, tangled
from pipepart.cluster import Cluster
from pipepart.planning import Cut, cut
from tests.graph_partition import oracle


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
def test_a_tangle_has_an_honest_bound():
    found = checked(tangled(500), 8)
    assert 0 < found.lower_bound <= found.bottleneck
    assert found.optimal == (found.gap == 0)
