"""Parses a networkx graph and a cluster into a Problem, and checks both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from ..cluster import Cluster
from ..input_error import InputError
from .device_orders import device_types
from .problem import UNLIMITED, DeviceType, Net, Problem, tidy_nets

Tensors = Iterable[tuple[float, Iterable[Hashable]]]
_Pins = list[tuple[float, list[Hashable]]]


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
    if not nx.is_directed_acyclic_graph(graph):
        cycle = " -> ".join(repr(before) for before, _ in nx.find_cycle(graph))
        raise InputError(f"the graph has a cycle, so it has no execution order: {cycle} -> back to the first")
    kinds = sorted({device.kind for device in cluster.devices})
    seconds = {node: [_seconds(graph, node, kind) for kind in kinds] for node in graph}
    size = {node: math.ceil(_number(graph.nodes[node].get("bytes", 0), "bytes", node)) for node in graph}
    total = sum(size.values())
    if total >= UNLIMITED:
        raise InputError(f"the bytes of all nodes must be below 2**60 together, got {total}")
    pins = list(_pins(graph, tensors))
    types = device_types(cluster.model_copy(update={"links": (), "network": ()}))
    free = [node for node in graph if graph.nodes[node].get("together") is None and not any(seconds[node])]
    if total > min(kind.memory for kind in types):
        free = [node for node in free if not size[node]]
    members = _groups(graph, [*_labelled(graph), *_free_leaves(graph, free, pins)])
    number = {node: index for index, group in enumerate(members) for node in group}
    successors: list[set[int]] = [set() for _ in members]
    for before, after in graph.edges:
        if number[before] != number[after]:
            successors[number[before]].add(number[after])
    table = np.array([np.sum([seconds[node] for node in group], axis=0) for group in members])
    for group, of_kind in zip(members, table, strict=True):
        if not np.isfinite(of_kind).any():
            allowed = "; ".join(f"{node!r} on {_allowed_kinds(graph, node)}" for node in group)
            tied = "nodes that stay together" if len(group) > 1 else "node"
            raise InputError(f"no device of the cluster (kinds {kinds}) may run the {tied}: {allowed}")
    problem = Problem(
        successors=tuple(tuple(sorted(after)) for after in successors),
        bytes=np.array([sum(size[node] for node in group) for group in members], dtype=np.int64),
        nets=tidy_nets(Net(cost, tuple(number[pin] for pin in nodes)) for cost, nodes in pins),
        types=tuple(
            DeviceType(
                seconds=table[:, kinds.index(alike.kind)] / alike.speed,
                pays=alike.kind != host or len(kinds) == 1,
                memory=int(min(alike.memory, UNLIMITED)),
                devices=alike.devices,
            )
            for alike in types
        ),
    )
    return ParsedGraph(problem, members)


def _labelled(graph: nx.DiGraph) -> Iterator[tuple[Hashable, Hashable]]:
    """Yield pairs of nodes with the same ``together``."""
    first_of_label: dict[Hashable, Hashable] = {}
    for node in graph:
        label = graph.nodes[node].get("together")
        if label is not None and first_of_label.setdefault(label, node) != node:
            yield first_of_label[label], node


def _free_leaves(
    graph: nx.DiGraph, free: Iterable[Hashable], pins: _Pins
) -> Iterator[tuple[Hashable, Hashable]]:
    """Yield nodes that cost nothing, each with its only neighbour, whose stage it can always join.

    The neighbour must use each tensor of the node. Then the tensors cost no stage more, so no load grows. This leaves
    the published GNMT graphs with few enough downsets to be proven.

    Args:
        graph: acyclic.
        free: nodes without seconds and bytes that a stage may lack.
        pins: the tensors.
    """
    left, free = nx.Graph(graph), set(free)
    tensors_of: dict[Hashable, list[set[Hashable]]] = {node: [] for node in free}
    for _, nodes in pins:
        touched = set(nodes)
        for node in touched & free:
            tensors_of[node].append(touched)
    unchecked = deque(node for node in graph if node in free)
    while unchecked:
        node = unchecked.popleft()
        if node not in left or left.degree(node) != 1:
            continue
        (neighbour,) = left[node]
        if all(neighbour in touched for touched in tensors_of[node] if len(touched) > 1):
            yield node, neighbour
            left.remove_node(node)
            for touched in tensors_of[node]:
                touched.discard(node)
            if neighbour in free:
                unchecked.append(neighbour)


def _groups(graph: nx.DiGraph, ties: Sequence[tuple[Hashable, Hashable]]) -> tuple[tuple[Hashable, ...], ...]:
    """Return the groups of nodes that must share a stage, in an execution order.

    A group has tied nodes and all nodes on paths between them, because a path that leaves a stage must not return to
    it. Groups are the strongly connected components of the graph with two-way edges between tied nodes.
    """
    index_of = {node: index for index, node in enumerate(graph)}
    # This is the order of the graph's nodes if that is an execution order.
    order = list(nx.lexicographical_topological_sort(graph, key=index_of.__getitem__))
    if not ties:
        return tuple((node,) for node in order)
    position = {node: index for index, node in enumerate(order)}
    tied = nx.DiGraph(graph.edges)
    tied.add_nodes_from(graph)
    tied.add_edges_from([*ties, *((other, node) for node, other in ties)])
    condensed = nx.condensation(tied)
    groups = {
        index: sorted(data["members"], key=position.__getitem__) for index, data in condensed.nodes.items()
    }
    in_order = nx.lexicographical_topological_sort(condensed, key=lambda index: position[groups[index][0]])
    return tuple(tuple(groups[index]) for index in in_order)


def _seconds(graph: nx.DiGraph, node: Hashable, kind: str) -> float:
    value: Any = graph.nodes[node].get("seconds")
    if value is None:
        raise InputError(
            f"node {node!r} has no attribute 'seconds': give a number, or one for each kind of device"
        )
    if isinstance(value, Mapping):
        return _number(value[kind], f"seconds[{kind!r}]", node) if kind in value else math.inf
    return _number(value, "seconds", node)


def _allowed_kinds(graph: nx.DiGraph, node: Hashable) -> str:
    seconds: Any = graph.nodes[node]["seconds"]
    return f"{sorted(seconds)}" if isinstance(seconds, Mapping) else "any kind"


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


def _pins(graph: nx.DiGraph, tensors: Tensors | None) -> Iterator[tuple[float, list[Hashable]]]:
    """Yield the seconds of each tensor, and the nodes that make or use it."""
    if tensors is None:
        for node in graph:
            seconds = _number(graph.nodes[node].get("transfer_seconds", 0), "transfer_seconds", node)
            yield seconds, [node, *graph.successors(node)]
        return
    for index, (seconds, nodes) in enumerate(tensors):
        if not isinstance(nodes, Iterable):
            raise InputError(
                f"tensor {index} must be its seconds and the nodes that touch it, got {(seconds, nodes)!r}"
            )
        pins = list(nodes)
        unknown = [pin for pin in pins if pin not in graph]
        if unknown:
            raise InputError(f"tensor {index} touches {unknown[0]!r}, which is not a node of the graph")
        yield _finite(seconds, f"seconds of tensor {index} ({pins!r})"), pins
