"""Published layer graphs are cut to their proven optima."""

import re

import pytest

from pipepart.planning import Cut, cut
from tests.graph_partition import oracle
from tests.graph_partition.instances import Instance, placement, profile, reference

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
