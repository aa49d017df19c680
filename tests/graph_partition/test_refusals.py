"""Errors for graphs that cannot be cut name the node and the numbers; memory limits are exact to the byte."""

from typing import Any

import networkx as nx
import pytest

from pipepart.cluster import Cluster, Device
from pipepart.planning import CutDoesNotFit, cut

TWO = Cluster.parse(["1KiB", "1KiB"])


def path(*nodes: dict[str, Any]) -> nx.DiGraph:
    graph = nx.DiGraph()
    for index, attributes in enumerate(nodes):
        graph.add_node(f"n{index}", **attributes)
    nx.add_path(graph, list(graph))
    return graph


def sized(*sizes: int) -> nx.DiGraph:
    return path(*({"seconds": 1.0, "bytes": size} for size in sizes))


def cycle() -> nx.DiGraph:
    graph = sized(1, 1)
    graph.add_edge("n1", "n0")
    return graph


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no nodes": (nx.DiGraph(), None, "no nodes"),
    "no directions": (nx.path_graph(3), None, r"must be a networkx\.DiGraph"),
    "a cycle": (cycle(), None, r"cycle.*'n0' -> 'n1'"),
    "no seconds": (path({"seconds": 1.0}, {}), None, r"node 'n1' has no attribute 'seconds'"),
    "a negative number": (
        path({"seconds": 1.0, "transfer_seconds": -1}),
        None,
        r"transfer_seconds of node 'n0'.*-1",
    ),
    "no device": (path({"seconds": 1.0}, {"seconds": {"tpu": 1.0}}), None, r"no device.*'n1' on \['tpu'\]"),
    "an unknown node": (sized(1), [(1.0, ["n0", "x"])], "tensor 0 touches 'x'"),
    "a tensor without seconds": (sized(1, 1), [(None, ["n0", "n1"])], "seconds of tensor 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_problem_is_refused(case):
    graph, tensors, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        cut(graph, TWO, tensors)


@pytest.mark.parametrize(
    ("sizes", "short", "message"),
    [
        ((10, 1025), 1, r"'n1' needs 1025 bytes.*1 bytes short"),
        (
            (1000, 1000, 100),
            76,
            r"needs 2100 bytes, and the 2 devices hold 2048 in all: 76 bytes more on each",
        ),
        ((600, 600, 600), 176, "176 bytes more on each"),  # any two of them share a device of 1024 bytes
        ((500, 525, 1024), 1, "1 bytes more on each"),
    ],
)
def test_what_does_not_fit_says_how_many_bytes_are_enough(sizes, short, message):
    with pytest.raises(CutDoesNotFit, match=message) as caught:
        cut(sized(*sizes), TWO)
    assert caught.value.short_bytes == short


def test_more_memory_does_not_help_if_the_kinds_of_devices_forbid_all_cuts():
    graph = path({"seconds": {"a": 1.0}}, {"seconds": {"b": 1.0}}, {"seconds": {"a": 1.0}})
    devices = (Device(name="a", kind="a"), Device(name="b", kind="b"))
    with pytest.raises(CutDoesNotFit, match="With any memory, no order of the devices"):
        cut(graph, Cluster(devices=devices))


def test_memory_is_a_limit_to_the_byte():
    assert cut(sized(500, 524, 1024), TWO).stages == (["n0", "n1"], ["n2"])


def test_without_time_a_branched_graph_that_may_not_fit_is_refused_at_once():
    graph = sized(600, 600, 600, 100)
    graph.remove_edge("n0", "n1")
    graph.add_edge("n0", "n2")
    with pytest.raises(CutDoesNotFit, match=r"no cut was found within 0\.0 seconds"):
        cut(graph, TWO, seconds=0.0)
    with pytest.raises(CutDoesNotFit, match="176 bytes more on each"):
        cut(graph, TWO)


def test_a_node_runs_only_on_kinds_it_has_seconds_for():
    devices = (Device(name="a", kind="a"), Device(name="b", kind="b"))
    found = cut(path({"seconds": {"b": 5.0}}, {"seconds": {"a": 1.0}}), Cluster(devices=devices))
    assert [device.name for device in found.devices] == ["b", "a"]


def test_nodes_tied_together_take_what_lies_between_with_them():
    graph = path(*({"seconds": 1.0} for _ in range(4)))
    graph.nodes["n0"]["together"] = graph.nodes["n2"]["together"] = "embedding"
    assert cut(graph, TWO).stages == (["n0", "n1", "n2"], ["n3"])


def test_the_host_pays_nothing_for_tensors_unless_told():
    graph = path({"seconds": {"cpu": 2.0}, "transfer_seconds": 5.0}, {"seconds": {"gpu": 2.0}})
    mixed = Cluster(devices=(Device(name="gpu", kind="gpu"), Device(name="cpu", kind="cpu")))
    assert cut(graph, mixed).loads == (2.0, 7.0)
    assert cut(graph, mixed, host=None).loads == (7.0, 7.0)
