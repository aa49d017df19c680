"""Lower bound on the bottleneck of any cut, from minimum cuts: the least traffic that can cross a border."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
from networkx.algorithms.flow import boykov_kolmogorov

from ..device_states import DeviceStates
from ..exact.capacity import SLACK, Capacity
from ..exact.skips import Skips
from ..problem import Floats, Net, Problem

# Number of ranges of the work before a border, and the stage lengths, in even shares of one device.
RANGES = 40
LENGTHS = (0.35, 0.8)

# Minimum cuts for each range, each with another price on work.
PRICES = 3

# The bound is bisected to this fraction.
PRECISION = 1e-4

# Capacities are integers, so that rounding leaves no residual capacity. This is the largest sum of them.
UNITS = 10**12

_SOURCE, _SINK = "source", "sink"


class CrossingBound:
    """For each range of the work before a border, the least that must cross it.

    A stage of more work than a given length pays at both of its borders for each net that cannot pass over that
    length. So the least crossing is found once for each of ``LENGTHS``, over the nets without the uses further away.
    Takes ``RANGES`` x ``LENGTHS`` x ``PRICES`` minimum cuts of the graph at the most.
    """

    def __init__(self, problem: Problem, states: DeviceStates, skips: Skips) -> None:
        self._problem, self._states = problem, states
        total = float(problem.work.sum())
        second = Capacity(problem, states, 1.0)
        even_share = total / float(second.total[0]) * second.largest_capacity
        self._edges: Floats = np.linspace(0.0, total, RANGES + 1)
        self._costs: list[tuple[float, Floats]] = []
        for length in LENGTHS:
            nets = _near_nets(problem, skips, length * even_share)
            found = [
                _least_crossing(problem, skips, nets, float(low), float(high))
                for low, high in zip(self._edges[:-1], self._edges[1:], strict=True)
            ]
            self._costs.append((length * even_share, np.nan_to_num(np.array(found), posinf=0.0)))
            self._exists = np.isfinite(found)

    def bound(self, low: float, high: float) -> float:
        """Return the best lower bound between ``low`` (already a bound) and ``high``, in seconds."""
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            if self._possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _possible(self, seconds: float) -> bool:
        """Return True if the devices can reach the end when each border is crossed by the least traffic of its range.

        A stage from one range to another is at least as long as from the end of the first to the begin of the second.
        """
        capacity = Capacity(self._problem, self._states, seconds)
        device = capacity.largest_capacity * (1 + SLACK)
        first, last = self._edges[:-1], self._edges[1:]
        # Row 0 is the empty border and the last column the full one: nothing crosses these.
        begin, end = np.append(0.0, last), np.append(first, self._edges[-1])
        length = np.maximum(end[None, :] - begin[:, None], 0.0)
        crossing_cost = np.zeros_like(length)
        for above, costs in self._costs:
            both = np.append(0.0, costs)[:, None] + np.append(costs, 0.0)[None, :]
            crossing_cost = np.maximum(crossing_cost, np.where(length > above, both, 0.0))
        stage = length + capacity.transfer_weight * crossing_cost <= device
        stage |= length <= capacity.free_capacity
        # Work only grows: a stage leads from range i (row i + 1) to range i (column i) or a later one.
        stage &= np.arange(len(end))[None, :] >= np.arange(len(begin))[:, None] - 1
        exists = np.append(self._exists, True)
        reached = np.append(True, np.zeros(len(first), dtype=bool))
        for _ in range(capacity.devices):
            ends = stage[reached].any(axis=0) & exists
            if ends[-1]:
                return True
            reached |= np.append(False, ends[:-1])
        return False


def _near_nets(problem: Problem, skips: Skips, limit: float) -> list[Net]:
    """Return the nets whose first pin is an ancestor of all others, without pins more than ``limit`` of work away."""
    found = []
    for number in np.nonzero(skips.rooted)[0].tolist():
        root, *others = problem.nets[number].pins
        uses = tuple(use for use in others if skips.between(root, use) <= limit)
        if uses:
            found.append(Net(problem.nets[number].seconds, (root, *uses)))
    return found


def _least_crossing(problem: Problem, skips: Skips, nets: list[Net], low: float, high: float) -> float:
    """Return the least seconds of ``nets`` that cross any border with ``low`` to ``high`` of work before it.

    A minimum cut gives the border that the least crosses: an arc of infinite capacity from each node to its
    predecessors keeps them on its side (Picard, "Maximal Closure of a Graph", Management Science 1976). Nodes with more
    than ``high`` of work among their ancestors are behind each border in the range, those with too little behind them
    are before it. A price on work draws the cut into the range; the value less the price is a bound for any price
    (Lagrangian relaxation). The result is infinite if some node would have to be on both sides.
    """
    border = _MinimumCut(problem, skips, nets, low, high)
    if border.impossible:
        return math.inf
    best, price, step = 0.0, 0.0, border.typical_price()
    lowest, highest = -math.inf, math.inf
    for _ in range(PRICES):
        value, work = border.solve(price)
        best = max(best, value - price * (high if price > 0 else low))
        if low <= work <= high:
            break
        lowest, highest = (price, highest) if work > high else (lowest, price)
        if math.isfinite(lowest) and math.isfinite(highest):
            price = (lowest + highest) / 2
        else:
            price, step = price + (step if work > high else -step), 4 * step
    return best


class _MinimumCut:
    """The flow network whose cuts are the borders in a range of work."""

    def __init__(self, problem: Problem, skips: Skips, nets: list[Net], low: float, high: float) -> None:
        total = float(problem.work.sum())
        slack = 1e-11 * total
        self._out = skips.ancestor_work > high + slack
        self._in = total - skips.descendant_work < low - slack
        self.impossible = bool((self._out & self._in).any())
        self._problem, self._nets, self._work = problem, nets, problem.work
        self._work_before = float(problem.work[self._in].sum())
        self._open = np.nonzero(~self._out & ~self._in)[0].tolist()
        seconds = sum(net.seconds for net in nets) + float(problem.work[self._open].sum())
        self._unit = max(seconds, 1e-300) / UNITS

    def typical_price(self) -> float:
        """Return a price that makes all work cost about as much as all nets."""
        work = float(self._work[self._open].sum())
        return sum(net.seconds for net in self._nets) / len(self._nets) / work if work and self._nets else 0.0

    def solve(self, price: float) -> tuple[float, float]:
        """The least crossing + ``price`` x work of any border in the range, and the work before one that has it."""
        graph = nx.DiGraph()
        graph.add_nodes_from((_SOURCE, _SINK))
        value = price * self._work_before
        for number, net in enumerate(self._nets):
            value += self._add_net(graph, net, ("net", number))
        for node in self._open:
            for earlier in self._problem.predecessors[node]:
                if not self._in[earlier]:
                    graph.add_edge(node, earlier)  # against the edge, so never the arc of a net
            work = price * float(self._work[node])
            value += min(work, 0.0)
            self._add_capacity(graph, *((node, _SINK) if work > 0 else (_SOURCE, node)), abs(work))
        flow, (side, _) = nx.minimum_cut(graph, _SOURCE, _SINK, flow_func=boykov_kolmogorov)
        value += (int(flow) - graph.number_of_edges()) * self._unit  # rounding loses half a unit an arc
        return value, self._work_before + float(
            self._work[[node for node in self._open if node in side]].sum()
        )

    def _add_net(self, graph: nx.DiGraph, net: Net, name: object) -> float:
        """Add the arcs of a net; return its seconds if each border in the range cuts it."""
        root, *pins = net.pins
        if self._out[root]:
            return 0.0
        uses = [use for use in pins if not self._in[use]]
        surely_out = any(self._out[use] for use in uses)
        if self._in[root] and surely_out:
            return net.seconds
        tail = _SOURCE if self._in[root] else root
        if surely_out:
            self._add_capacity(graph, tail, _SINK, net.seconds)
        elif len(uses) == 1:
            self._add_capacity(graph, tail, uses[0], net.seconds)
        elif uses:
            self._add_capacity(graph, tail, name, net.seconds)
            graph.add_edges_from((name, use) for use in uses)
        return 0.0

    def _add_capacity(self, graph: nx.DiGraph, tail: object, head: object, seconds: float) -> None:
        units = round(seconds / self._unit)
        if not graph.has_edge(tail, head):
            graph.add_edge(tail, head, capacity=units)
        elif "capacity" in graph[tail][head]:
            graph[tail][head]["capacity"] += units
