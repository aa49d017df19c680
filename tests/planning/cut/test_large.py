"""Large graphs: chains and modules are proven in seconds, tangles get a better cut than any order's and a bound."""

import time

import pytest

from benchmarks.planning import chain, inception, tangled
from pipepart.cluster import Cluster
from pipepart.planning import Cut, cut
from tests.planning.cut import oracle


def timed(graph, devices: int) -> tuple[Cut, float]:
    cluster = Cluster.parse(["24GiB"] * devices)
    start = time.process_time()
    found = cut(graph, cluster)
    seconds = time.process_time() - start
    assert oracle.check(graph, cluster, None, found) == pytest.approx(found.bottleneck, rel=1e-12)
    return found, seconds


@pytest.mark.slow
def test_ten_thousand_layers_over_sixty_four_devices_take_two_seconds():
    found, seconds = timed(chain(10_000), 64)
    assert found.optimal
    assert seconds < 2


@pytest.mark.slow
def test_two_thousand_layers_in_modules_are_proven_within_thirty_seconds():
    found, seconds = timed(inception(2000), 16)
    assert found.optimal
    assert seconds < 30


@pytest.mark.slow
def test_a_tangle_has_an_honest_bound():
    found, _ = timed(tangled(500), 8)
    assert 0 < found.lower_bound <= found.bottleneck
    assert found.optimal == (found.gap == 0)
