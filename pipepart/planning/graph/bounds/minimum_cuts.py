"""How little can cross a border with so much work before it: minimum cuts, in which infinite arcs keep the order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import networkx as nx
import numpy as np
from networkx.algorithms.flow import boykov_kolmogorov

from ..exact.spans import Spans
from ..problem import Problem

# Capacities are whole numbers, so that no crumbs of rounding are left over: the largest amount in all.
UNITS = 10**12

# Questions with a price on work, for each amount of work.
PRICES = 3

_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True)
class Tether:
    """A tensor with those uses that no long stage can pass over: it is cut where ``root`` is in and a use is out."""

    seconds: float
    root: int
    uses: tuple[int, ...]


def tethers(problem: Problem, spans: Spans, limit: float) -> list[Tether]:
    """The tensors, without the uses that are further than ``limit`` of work from their maker.

    A stage of more work pays for each of them that either of its borders cuts: where the root is before the stage, a
    use is not behind it. Tensors with no maker before all uses are left out.
    """
    found = []
    for net in problem.nets:
        root, *others = net.pins
        uses = tuple(use for use in others if spans.between(root, use) <= limit)
        if uses and spans.reach[root, list(net.pins)].all():
            found.append(Tether(net.seconds, root, uses))
    return found


def least_crossing(problem: Problem, spans: Spans, tied: list[Tether], low: float, high: float) -> float:
    """Seconds of tensors that cross each border with ``low`` to ``high`` of work before it, at the least.

    Nodes with more than ``high`` before them are behind each such border, and those with too little left behind them
    before it; between these the least cut is a closure: an arc of infinite capacity from each node to those it uses
    keeps them on its side (Picard, "Maximal Closure of a Graph", Management Science 1976). A price on work draws that
    cut into the range; any price gives a bound. Infinite where some node would have to be on both sides.
    """
    closure = _Closure(problem, spans, tied, low, high)
    if closure.impossible:
        return math.inf
    best, price, step = 0.0, 0.0, closure.steepness()
    lowest, highest = -np.inf, np.inf
    for _ in range(PRICES):
        value, work = closure.cut(price)
        best = max(best, value - price * (high if price > 0 else low))
        if low <= work <= high:
            break
        if work > high:
            lowest = price
        else:
            highest = price
        if np.isfinite(lowest) and np.isfinite(highest):
            price = (lowest + highest) / 2
        else:
            price, step = price + (step if work > high else -step), 4 * step
    return best


class _Closure:
    """The graph whose cuts are the borders in a range of work."""

    def __init__(self, problem: Problem, spans: Spans, tied: list[Tether], low: float, high: float) -> None:
        total, slack = float(problem.work.sum()), 1e-11 * float(problem.work.sum())
        self._out = spans.ahead > high + slack
        self._in = total - spans.behind < low - slack
        self.impossible = bool((self._out & self._in).any())
        self._work = problem.work
        self._before = float(problem.work[self._in].sum())
        self._free = np.nonzero(~self._out & ~self._in)[0].tolist()
        self._problem, self._tied = problem, tied
        self._unit = (
            max(sum(net.seconds for net in tied) + float(problem.work[self._free].sum()), 1e-300) / UNITS
        )

    def steepness(self) -> float:
        """A price on work that weighs about as much as the tensors do."""
        work = float(self._work[self._free].sum())
        return sum(net.seconds for net in self._tied) / len(self._tied) / work if work and self._tied else 0.0

    def cut(self, price: float) -> tuple[float, float]:
        """The least of crossing + ``price`` x work of any border, and the work before one that has it."""
        graph = nx.DiGraph()
        graph.add_nodes_from((_SOURCE, _SINK))
        value = price * self._before
        for number, tether in enumerate(self._tied):
            value += self._add_tether(graph, tether, number)
        for node in self._free:
            for earlier in self._problem.predecessors[node]:
                if not self._in[earlier]:
                    graph.add_edge(node, earlier)  # Against the edge, so never the arc of a tensor.
            work = price * float(self._work[node])
            value += min(work, 0.0)
            _raise(graph, *((node, _SINK) if work > 0 else (_SOURCE, node)), self._units(abs(work)))
        flow, (side, _) = nx.minimum_cut(graph, _SOURCE, _SINK, flow_func=boykov_kolmogorov)
        # Half a unit may be lost at each arc.
        value += (int(flow) - graph.number_of_edges()) * self._unit
        return value, self._before + float(self._work[[node for node in self._free if node in side]].sum())

    def _add_tether(self, graph: nx.DiGraph, tether: Tether, number: int) -> float:
        """Adds the arcs of a tensor; its seconds where it is cut for sure."""
        root, units = tether.root, self._units(tether.seconds)
        if self._out[root]:
            return 0.0
        uses = [use for use in tether.uses if not self._in[use]]
        lost = any(self._out[use] for use in uses)
        if self._in[root] and lost:
            return tether.seconds
        tail = _SOURCE if self._in[root] else root
        if lost:
            _raise(graph, tail, _SINK, units)
        elif len(uses) == 1:
            _raise(graph, tail, uses[0], units)
        elif uses:
            tensor = ("tensor", number)
            graph.add_edge(tail, tensor, capacity=units)
            graph.add_edges_from((tensor, use) for use in uses)
        return 0.0

    def _units(self, seconds: float) -> int:
        return round(seconds / self._unit)


def _raise(graph: nx.DiGraph, tail: object, head: object, amount: int) -> None:
    if graph.has_edge(tail, head):
        if "capacity" in graph[tail][head]:
            graph[tail][head]["capacity"] += amount
    else:
        graph.add_edge(tail, head, capacity=amount)
