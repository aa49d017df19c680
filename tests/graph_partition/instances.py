"""Layer graphs with proven best cuts, from tests/data/partition, as arguments of ``cut``."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from pipepart.cluster import Cluster, Device

DATA = Path(__file__).parents[1] / "data" / "partition"


@dataclass(frozen=True)
class Instance:
    """A graph, the nets between its nodes, and devices to cut it for."""

    graph: nx.DiGraph
    tensors: list[tuple[float, list[Hashable]]] | None
    cluster: Cluster


def reference() -> dict:
    """The proven optima."""
    return json.loads((DATA / "reference.json").read_text())


def placement(name: str, *, with_cpu: bool) -> Instance:
    """A placement instance: forward nodes carry their backward ones, which only add seconds, bytes and tensors."""
    data = json.loads((DATA / "placement" / f"{name}.json").read_text())
    nodes = {node["id"]: node for node in data["nodes"]}
    label = {key: ("alone", key) if node.get("colorClass") is None else node["colorClass"]
             for key, node in nodes.items()}  # fmt: skip
    forward = {label[key] for key, node in nodes.items() if not node["isBackwardNode"]}
    graph = nx.DiGraph()
    for key, node in nodes.items():
        here = graph.nodes[label[key]] if label[key] in graph else None
        if here is None:
            graph.add_node(label[key], seconds={"fpga": 0.0, "cpu": 0.0}, bytes=0)
            here = graph.nodes[label[key]]
        here["bytes"] += node["size"]
        here["seconds"]["cpu"] += node["cpuLatency"]
        if node["supportedOnFpga"] and "fpga" in here["seconds"]:
            here["seconds"]["fpga"] += node["fpgaLatency"]
        else:
            here["seconds"].pop("fpga", None)
    pins: dict[int, list[Hashable]] = {}
    costs: dict[int, float] = {}
    for edge in data["edges"]:
        before, after = edge["sourceId"], edge["destId"]
        pins.setdefault(before, [label[before]]).append(label[after])
        costs[before] = edge["cost"]
        backward = nodes[before]["isBackwardNode"], nodes[after]["isBackwardNode"]
        if label[before] == label[after]:
            continue
        if not any(backward):
            graph.add_edge(label[before], label[after])
        elif all(backward) and not {label[before], label[after]} <= forward:
            # A class without a forward node gets the mirror image of its backward edges.
            graph.add_edge(label[after], label[before])
    graph = _without_cycles(graph)
    devices = [Device(name=f"fpga:{i}", kind="fpga", memory_bytes=int(data["maxSizePerFPGA"]))
               for i in range(data["maxFPGAs"])]  # fmt: skip
    if with_cpu:
        devices.append(Device(name="cpu", kind="cpu"))
    return Instance(graph, [(costs[key], pins[key]) for key in pins], Cluster(devices=tuple(devices)))


def _without_cycles(graph: nx.DiGraph) -> nx.DiGraph:
    """The graph with the classes on a cycle tied together, and no edges between them."""
    for index, component in enumerate(nx.strongly_connected_components(graph)):
        if len(component) > 1:
            graph.remove_edges_from(list(graph.subgraph(component).edges))
            nx.set_node_attributes(graph, dict.fromkeys(component, index), "together")
    return graph


def profile(name: str, devices: int, gigabits: int) -> Instance:
    """A profile of PipeDream: milliseconds of forward and backward, activations and gradients over one link."""
    graph = nx.DiGraph()
    edges = []
    for line in (DATA / "profiles" / f"{name}.txt").read_text().splitlines():
        if line.startswith("\t"):
            edges.append(tuple(line.strip().split(" -- ")))
            continue
        node, kind, costs = line.split(" -- ")
        if kind.startswith("Input"):
            continue
        number = {key: value.strip("[]") for key, value in re.findall(r"(\w+)=([^,]+)", costs)}
        activation = sum(map(float, number["activation_size"].split(";")))
        graph.add_node(
            node,
            seconds=float(number["forward_compute_time"]) + float(number["backward_compute_time"]),
            transfer_seconds=2 * activation / (gigabits * 1e9 / 8) * 1e3,
        )
    graph.add_edges_from((a, b) for a, b in edges if a in graph and b in graph)
    return Instance(graph, None, Cluster.parse(["1TB"] * devices))
