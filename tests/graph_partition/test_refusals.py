"""What cannot be cut is refused with the node and the numbers; memory is a limit to the byte."""

import networkx as nx
import pytest

from pipepart.cluster import Cluster, Device
from pipepart.planning import CutDoesNotFit, cut

TWO = Cluster.parse(["1KiB", "1KiB"])


def path(*nodes: dict) -> nx.DiGraph:
    graph = nx.DiGraph()
    for index, attributes in enumerate(nodes):
        graph.add_node(f"n{index}", **attributes)
    nx.add_path(graph, list(graph))
    return graph


def sized(*sizes: int) -> nx.DiGraph:
    return path(*({"seconds": 1.0, "bytes": size} for size in sizes))


def test_a_cycle_is_named():
    graph = path({"seconds": 1.0}, {"seconds": 1.0})
    graph.add_edge("n1", "n0")
    with pytest.raises(ValueError, match=r"cycle.*'n0' -> 'n1'"):
        cut(graph, TWO)


def test_a_node_without_seconds_is_named():
    with pytest.raises(ValueError, match=r"node 'n1' has no attribute 'seconds'"):
        cut(path({"seconds": 1.0}, {}), TWO)


def test_a_negative_number_is_named():
    with pytest.raises(ValueError, match=r"transfer_seconds of node 'n0'.*-1"):
        cut(path({"seconds": 1.0, "transfer_seconds": -1}), TWO)


def test_a_node_that_no_device_may_run_is_named():
    with pytest.raises(ValueError, match=r"no device.*'n1' on \['tpu'\]"):
        cut(path({"seconds": 1.0}, {"seconds": {"tpu": 1.0}}), TWO)


def test_a_tensor_of_an_unknown_node_is_refused():
    with pytest.raises(ValueError, match="tensor 0 touches 'x'"):
        cut(path({"seconds": 1.0}), TWO, [(1.0, ["n0", "x"])])


def test_a_node_too_large_for_any_device_is_short_by_the_difference():
    with pytest.raises(CutDoesNotFit, match=r"'n1' needs 1025 bytes.*1 bytes short") as caught:
        cut(sized(10, 1025), TWO)
    assert (caught.value.nodes, caught.value.short_bytes) == (["n1"], 1)


def test_more_bytes_than_all_devices_hold_are_short_by_the_difference():
    with pytest.raises(CutDoesNotFit) as caught:
        cut(sized(1000, 1000, 100), TWO)
    assert caught.value.short_bytes == 2100 - 2048


def test_the_stage_that_lacks_least_is_named_where_no_cut_fits():
    # Sizes 600, 600, 600: any two of them share a device of 1024 bytes.
    with pytest.raises(CutDoesNotFit, match=r"stage .* 176 bytes short") as caught:
        cut(sized(600, 600, 600), Cluster.parse(["1KiB", "1KiB"]))
    assert caught.value.short_bytes == 176
    assert len(caught.value.nodes) == 2


def test_without_time_a_branched_graph_that_may_not_fit_is_refused_at_once():
    graph = sized(600, 600, 600, 100)
    graph.remove_edge("n0", "n1")
    graph.add_edge("n0", "n2")
    with pytest.raises(CutDoesNotFit, match=r"no cut was found within 0\.0 seconds"):
        cut(graph, TWO, seconds=0.0)
    with pytest.raises(CutDoesNotFit, match=r"in the nearest cut, stage .* bytes short"):
        cut(graph, TWO)


def test_memory_is_a_limit_to_the_byte():
    graph = sized(500, 524, 1024)
    found = cut(graph, TWO)
    assert found.stages == (["n0", "n1"], ["n2"])
    graph.nodes["n1"]["bytes"] = 525
    with pytest.raises(CutDoesNotFit) as caught:
        cut(graph, TWO)
    assert caught.value.short_bytes == 1


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


def test_a_graph_without_directions_is_refused():
    with pytest.raises(ValueError, match=r"must be a networkx\.DiGraph"):
        cut(nx.path_graph(3), TWO)  # pyright: ignore[reportArgumentType]


def test_a_tensor_without_seconds_is_named():
    with pytest.raises(ValueError, match="seconds of tensor 0"):
        cut(sized(1, 1), TWO, [(None, ["n0", "n1"])])  # pyright: ignore[reportArgumentType]
