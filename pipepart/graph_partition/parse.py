"""Parses a networkx graph and a cluster into a Problem, and checks both."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from ..cluster import Cluster
from ..input_error import InputError
from .device_orders import device_types
from .problem import UNLIMITED, DeviceType, Net, Problem, tidy_nets

Tensors = Iterable[tuple[float, Iterable[Hashable]]]


@dataclass(frozen=True)
class ParsedGraph:
    """A problem, and for each of its nodes the graph nodes that it represents, in execution order."""

    problem: Problem
    members: tuple[tuple[Hashable, ...], ...]


def parse(graph: nx.DiGraph, cluster: Cluster, tensors: Tensors | None, host: str | None) -> ParsedGraph:
    """Convert the arguments of :func:`pipepart.planning.cut` to a problem.

    Raises:
        ValueError: the graph is empty or has a cycle, a node lacks its seconds or no device may run it, a number is
            negative or not finite, or a tensor touches a node that is not in the graph.
    """
    if not isinstance(graph, nx.Graph) or not graph.is_directed():
        raise InputError(
            f"the graph must be a networkx.DiGraph, its edges say what comes before what; got {graph!r}"
        )
    if graph.is_multigraph():
        graph = nx.DiGraph(graph)
    if not len(graph):
        raise InputError("the graph has no nodes: there is nothing to cut")
    members = _classes(graph)
    number = {node: index for index, group in enumerate(members) for node in group}
    successors: list[set[int]] = [set() for _ in members]
    for before, after in graph.edges:
        if number[before] != number[after]:
            successors[number[before]].add(number[after])
    size = [sum(_bytes(graph, node) for node in group) for group in members]
    if sum(size) >= UNLIMITED:
        raise InputError(f"the bytes of all nodes must be below 2**60 together, got {sum(size)}")
    problem = Problem(
        successors=tuple(tuple(sorted(after)) for after in successors),
        bytes=np.array(size, dtype=np.int64),
        nets=tidy_nets(_nets(graph, tensors, number)),
        types=_device_types(graph, cluster, members, host),
    )
    return ParsedGraph(problem, members)


def _classes(graph: nx.DiGraph) -> tuple[tuple[Hashable, ...], ...]:
    """Return the groups of nodes that must share a stage, in an execution order.

    A group has the nodes with the same ``together`` and all nodes on paths between them, because a path that leaves a
    stage must not return to it. Groups are the strongly connected components of the graph with two-way edges between
    tied nodes.
    """
    if not nx.is_directed_acyclic_graph(graph):
        cycle = " -> ".join(repr(before) for before, _ in nx.find_cycle(graph))
        raise InputError(f"the graph has a cycle, so it has no execution order: {cycle} -> back to the first")
    position = {node: index for index, node in enumerate(graph)}
    first_of_label: dict[Hashable, Hashable] = {}
    tied = nx.DiGraph(graph.edges)
    tied.add_nodes_from(graph)
    for node in graph:
        label = graph.nodes[node].get("together")
        if label is not None and first_of_label.setdefault(label, node) != node:
            tied.add_edges_from([(first_of_label[label], node), (node, first_of_label[label])])
    # Keep the order of the graph's nodes if it is an execution order.
    if not first_of_label and all(position[before] < position[after] for before, after in graph.edges):
        return tuple((node,) for node in graph)
    condensed = nx.condensation(tied)
    groups = {
        index: sorted(data["members"], key=position.__getitem__) for index, data in condensed.nodes.items()
    }
    order = nx.lexicographical_topological_sort(condensed, key=lambda index: position[groups[index][0]])
    return tuple(tuple(groups[index]) for index in order)


def _device_types(
    graph: nx.DiGraph, cluster: Cluster, members: Sequence[Sequence[Hashable]], host: str | None
) -> tuple[DeviceType, ...]:
    kinds = sorted({device.kind for device in cluster.devices})
    seconds = {kind: np.array([math.fsum(_seconds(graph, node, kind) for node in group) for group in members])
               for kind in kinds}  # fmt: skip
    for index, group in enumerate(members):
        if not any(math.isfinite(seconds[kind][index]) for kind in kinds):
            _refuse_banned(graph, group, kinds)
    # Without links and network, devices that differ only in their links get the same type.
    return tuple(
        DeviceType(
            seconds=seconds[alike.kind] / alike.speed,
            pays=alike.kind != host or len(kinds) == 1,
            memory=int(min(alike.memory, UNLIMITED)),
            devices=alike.devices,
        )
        for alike in device_types(cluster.model_copy(update={"links": (), "network": ()}))
    )


def _refuse_banned(graph: nx.DiGraph, group: Sequence[Hashable], kinds: Sequence[str]) -> None:
    allowed = "; ".join(f"{node!r} on {_kinds(graph, node)}" for node in group)
    tied = "nodes that stay together" if len(group) > 1 else "node"
    raise InputError(f"no device of the cluster (kinds {list(kinds)}) may run the {tied}: {allowed}")


def _kinds(graph: nx.DiGraph, node: Hashable) -> str:
    seconds: Any = graph.nodes[node]["seconds"]
    return f"{sorted(seconds)}" if isinstance(seconds, Mapping) else "any kind"


def _seconds(graph: nx.DiGraph, node: Hashable, kind: str) -> float:
    value: Any = graph.nodes[node].get("seconds")
    if value is None:
        raise InputError(
            f"node {node!r} has no attribute 'seconds': give a number, or one for each kind of device"
        )
    if isinstance(value, Mapping):
        return _number(value[kind], f"seconds[{kind!r}]", node) if kind in value else math.inf
    return _number(value, "seconds", node)


def _bytes(graph: nx.DiGraph, node: Hashable) -> int:
    value = graph.nodes[node].get("bytes", 0)
    _number(value, "bytes", node)
    return math.ceil(value)


def _number(value: Any, name: str, node: Hashable) -> float:
    return _finite(value, f"{name} of node {node!r}")


def _finite(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(f"{what} must be a finite number, 0 or more, got {value!r}")
    return number


def _nets(graph: nx.DiGraph, tensors: Tensors | None, number: Mapping[Hashable, int]) -> Iterable[Net]:
    if tensors is None:
        for node in graph:
            seconds = _number(graph.nodes[node].get("transfer_seconds", 0), "transfer_seconds", node)
            yield Net(seconds, tuple(number[pin] for pin in (node, *graph.successors(node))))
        return
    for index, (seconds, nodes) in enumerate(tensors):
        if not isinstance(nodes, Iterable):
            raise InputError(
                f"tensor {index} must be its seconds and the nodes that touch it, got {(seconds, nodes)!r}"
            )
        pins = list(nodes)
        unknown = [pin for pin in pins if pin not in number]
        if unknown:
            raise InputError(f"tensor {index} touches {unknown[0]!r}, which is not a node of the graph")
        yield Net(
            _finite(seconds, f"seconds of tensor {index} ({pins!r})"), tuple(number[pin] for pin in pins)
        )
