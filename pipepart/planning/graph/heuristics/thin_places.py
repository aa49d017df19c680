"""Orders a graph through its thin places: borders at even shares of the work that few tensors cross."""

from __future__ import annotations

import math
from collections.abc import Iterator

import networkx as nx
import numpy as np
from networkx.algorithms.flow import boykov_kolmogorov
from numpy.typing import NDArray

from ..exact.reachability import Reachability
from ..problem import Floats, Problem

Nodes = NDArray[np.bool_]

# Minimum cuts for each border, each with another price on work.
PRICES = 4

# Capacities are integers: exact, so that no residual capacity is left by rounding.
UNITS = 10**9

_SOURCE, _SINK = "source", "sink"


def thin_order(problem: Problem, parts: int) -> list[int]:
    """Return a topological order that passes through a thin border at each of ``parts - 1`` even shares of the work.

    Each border holds the one before it and is a minimum cut (Boykov and Kolmogorov, 2004) among those whose work is
    less than half a share off. Between two borders the nodes keep their order.
    """
    stage = np.full(len(problem), parts, dtype=np.int64)
    for number, border in enumerate(_borders(problem, parts)):
        stage[border & (stage == parts)] = number
    return np.lexsort((np.arange(len(problem)), stage)).tolist()


def _borders(problem: Problem, parts: int) -> Iterator[Nodes]:
    """Yield for each border which nodes are before it; bool, shape (nodes,)."""
    before, after = Reachability(problem, 0, len(problem)).summed(problem.work)
    total = float(problem.work.sum())
    inside = np.zeros(len(problem), dtype=bool)
    for number in range(1, parts):
        low, high = ((number + shift) * total / parts for shift in (-0.5, 0.5))
        first = inside | (total - after < low)
        last = before > high
        if not (first & last).any():
            inside = _thin_border(problem, first, last, low, high)
        yield inside


def _thin_border(problem: Problem, first: Nodes, last: Nodes, low: float, high: float) -> Nodes:
    """Return the least crossed border that a few prices on work find, in the range of work if there is one."""
    work = problem.work
    is_open = ~first & ~last
    scale = float(work[is_open].sum())
    seconds = [net.seconds for net in problem.nets]
    if not scale or not seconds:
        return first
    price, step = 0.0, float(np.mean(seconds)) / scale
    short, long = first, ~last  # borders with less and with more work before them than the range has
    lowest, highest = -math.inf, math.inf
    found: list[tuple[float, float, Nodes]] = []
    for _ in range(PRICES):
        border = _cut(problem, first, last, price * work)
        inside = float(work[border].sum())
        found.append((max(low - inside, inside - high, 0.0), _crossing(problem, border), border))
        if low <= inside <= high:
            break
        if inside > high:
            long, lowest = border, price
        else:
            short, highest = border, price
        if math.isfinite(lowest) and math.isfinite(highest):
            price = (lowest + highest) / 2
        else:
            price, step = price + (step if inside > high else -step), 4 * step
    else:
        border = _between(problem, short, long, high)
        inside = float(work[border].sum())
        found.append((max(low - inside, inside - high, 0.0), _crossing(problem, border), border))
    return min(found, key=lambda one: one[:2])[2]


def _between(problem: Problem, short: Nodes, long: Nodes, high: float) -> Nodes:
    """Return the first border with those branches of the second that do not depend on each other and fit the range.

    No price on work tells branches that are alike apart: all of them are before the border, or none.
    """
    rest = np.flatnonzero(long & ~short).tolist()
    branches: nx.Graph = nx.Graph()
    branches.add_nodes_from(rest)
    branches.add_edges_from(
        (node, other) for node in rest for other in problem.successors[node] if long[other]
    )
    border, left = short.copy(), high - float(problem.work[short].sum())
    for branch in nx.connected_components(branches):
        nodes = sorted(branch)
        if (needed := float(problem.work[nodes].sum())) <= left:
            border[nodes] = True
            left -= needed
    return border


def _crossing(problem: Problem, border: Nodes) -> float:
    cut = (net.seconds for net in problem.nets if 0 < border[list(net.pins)].sum() < len(net.pins))
    return math.fsum(cut)


def _cut(problem: Problem, first: Nodes, last: Nodes, prices: Floats) -> Nodes:
    """Return the border with the least crossing plus prices of the nodes before it.

    ``first`` are before the border and ``last`` behind it. An arc of infinite capacity (no attribute) from each node to
    its predecessors keeps them before it. A tensor is an arc between two extra nodes: its pins lead to the one, and the
    other leads to its pins, so that it is cut if it has pins on both sides.
    """
    unit = (sum(net.seconds for net in problem.nets) + float(np.abs(prices).sum())) / UNITS
    name = [
        _SOURCE if a else _SINK if b else node for node, (a, b) in enumerate(zip(first, last, strict=True))
    ]
    network = nx.DiGraph()
    network.add_nodes_from([_SOURCE, _SINK])
    for node, others in enumerate(problem.successors):
        network.add_edges_from((name[other], name[node]) for other in others)
    for number, net in enumerate(problem.nets):
        pins = {name[pin] for pin in net.pins}
        if len(pins) > 1:
            network.add_edge(("in", number), ("out", number), capacity=round(net.seconds / unit))
            network.add_edges_from((pin, ("in", number)) for pin in pins if pin != _SINK)
            network.add_edges_from((("out", number), pin) for pin in pins if pin != _SOURCE)
    for node in np.flatnonzero(prices).tolist():
        if isinstance(name[node], int):
            ends = (node, _SINK) if prices[node] > 0 else (_SOURCE, node)
            network.add_edge(*ends, capacity=round(abs(float(prices[node])) / unit))
    network.remove_edges_from([*network.in_edges(_SOURCE), *network.out_edges(_SINK)])
    _, (side, _) = nx.minimum_cut(network, _SOURCE, _SINK, flow_func=boykov_kolmogorov)
    return np.array([one in side for one in name])
