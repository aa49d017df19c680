"""`python -m benchmarks.planning`: how long the cut of a layer graph takes, by its size, and how that grows."""

from __future__ import annotations

import math
import random
import time
from typing import Annotated

import networkx as nx
import typer
from rich.console import Console
from rich.table import Table

from pipepart.cluster import Cluster
from pipepart.planning import cut


def chain(layers: int) -> nx.DiGraph:
    """Layers that each feed the next one."""
    return _with_costs(nx.path_graph(layers, create_using=nx.DiGraph))


def residual(layers: int) -> nx.DiGraph:
    """A chain in which each third layer also feeds the third behind it, as in a residual network."""
    graph = chain(layers)
    graph.add_edges_from((layer, layer + 3) for layer in range(0, layers - 3, 3))
    return graph


def inception(layers: int) -> nx.DiGraph:
    """Modules of four branches of up to eight layers, each module behind the last."""
    draw = random.Random(0)
    graph = nx.DiGraph()
    last, count = 0, 1
    graph.add_node(0)
    while count < layers:
        ends = []
        for _ in range(4):
            branch = [last, *range(count, count + draw.randint(1, 8))]
            nx.add_path(graph, branch)
            ends.append(branch[-1])
            count = branch[-1] + 1
        graph.add_edges_from((end, count) for end in ends)
        last, count = count, count + 1
    return _with_costs(graph)


def tangled(layers: int) -> nx.DiGraph:
    """Each layer uses two of the eight before it: too many downsets to look at, so the answer has a bound only."""
    draw = random.Random(0)
    graph = nx.empty_graph(layers, create_using=nx.DiGraph)
    for layer in range(1, layers):
        graph.add_edges_from((draw.randint(max(0, layer - 8), layer - 1), layer) for _ in range(2))
    return _with_costs(graph)


def nasnet(cells: int) -> nx.DiGraph:
    """Cells of five blocks, each block of two inputs, all taken from the two cells before, as in NASNet-A.

    About 55 layers a cell; the tensors of later cells are smaller, and take 2 x bytes over 100 Gbit/s.
    """
    draw = random.Random(0)
    graph = nx.DiGraph()
    scale = 1.0

    def layer(inputs: list[int], seconds: float, tensor: float) -> int:
        node = len(graph)
        graph.add_node(node, seconds=seconds * draw.uniform(0.8, 1.25), transfer_seconds=tensor * scale)
        graph.add_edges_from((before, node) for before in inputs)
        return node

    def row(start: int, *seconds: float) -> int:
        for each in seconds:
            start = layer([start], each, 14.4)
        return start

    separable = (0.25, 0.8, 1.3, 0.5) * 2
    before = last = row(layer([], 3.0, 24.0), 2.0)
    for cell in range(cells):
        scale = 0.5 ** (cell * 3 // cells)
        old, new = row(before, 0.25, 1.2, 0.5), row(last, 0.25, 1.2, 0.5)
        blocks = [
            layer([row(new, *separable), row(old, *separable)], 0.3, 14.4),
            layer([row(old, *separable), row(old, *separable)], 0.3, 14.4),
            layer([row(new, 0.6), old], 0.3, 14.4),
            layer([row(old, 0.6), row(old, 0.6)], 0.3, 14.4),
            layer([row(new, *separable), new], 0.3, 14.4),
        ]
        before, last = last, layer([old, *blocks], 0.4, 86.4)
    row(last, 0.3, 0.3, 0.2)
    return graph


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="The smallest size of each, and a half of it.")
    ] = False,
) -> None:
    """Print the CPU seconds of the cut for graphs of growing size, and the exponent of the growth."""
    table = Table("graph", "layers", "devices", "CPU seconds", "growth", "bottleneck", "may be off by")
    for name, family, sizes, devices in (
        ("chain", chain, [1250, 2500, 5000, 10_000], 64),
        ("residual", residual, [1250, 2500, 5000, 10_000], 64),
        ("inception", inception, [250, 500, 1000, 2000], 16),
        ("tangled", tangled, [250, 500, 1000, 2000], 16),
        ("nasnet", nasnet, [5, 9, 18], 2),
        ("nasnet", nasnet, [5, 9, 18], 4),
        ("nasnet", nasnet, [5, 9, 18], 8),
    ):
        before: tuple[int, float] | None = None
        for size in [sizes[0] // 2, sizes[0]] if quick else sizes:
            graph = family(size)
            start = time.process_time()
            found = cut(graph, Cluster.parse(["24GiB"] * devices))
            seconds = time.process_time() - start
            growth = f"n^{_exponent(before, (len(graph), seconds)):.1f}" if before else ""
            off = "proven" if found.optimal else f"{found.gap:.1%}"
            table.add_row(
                name, f"{len(graph)}", f"{devices}", f"{seconds:.2f}", growth, f"{found.bottleneck:.2f}", off
            )
            before = len(graph), seconds
    Console().print(table)


def _exponent(before: tuple[int, float], after: tuple[int, float]) -> float:
    return math.log(after[1] / before[1]) / math.log(after[0] / before[0])


def _with_costs(graph: nx.DiGraph) -> nx.DiGraph:
    draw = random.Random(1)
    for node in graph:
        graph.nodes[node].update(seconds=draw.uniform(0.5, 1.5), transfer_seconds=draw.uniform(0, 1))
    return graph


if __name__ == "__main__":
    typer.run(main)
