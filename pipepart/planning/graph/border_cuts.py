"""Minimum cuts of a graph: the least seconds of tensors that cross a border with a given amount of work before it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from .exact.reachability import Reachability
from .problem import Floats, Ints, Problem

# Minimum cuts for each range of work, each with another price on work.
PRICES = 4

# Capacities are integers, so that rounding leaves no residual capacity. UNITS is the largest sum of the finite ones.
UNITS, INFINITE = 10**9, 2**30

# Amounts of work that differ by less than this part of all work may be equal.
SLACK = 1e-11


class BorderCuts:
    """The flow network whose cuts are the borders of a graph: a border is what lies on the source's side.

    An arc of infinite capacity from each node to its predecessors keeps them on its side (Picard, "Maximal Closure of a
    Graph", Management Science 1976). A tensor is an arc from its maker to an extra node, of its seconds, and arcs of
    infinite capacity from there to its uses: cut once if the maker is inside and any use outside. ::

          predecessor ◄──∞── node          maker ──seconds──► tensor ──∞──► use, use, ...

    Only tensors whose first pin leads to all others are in the network. Takes nodes² / 8 bytes.
    """

    def __init__(self, problem: Problem) -> None:
        nodes = len(problem)
        reachable = Reachability(problem, 0, nodes)
        self.total = float(problem.work.sum())
        self._work = problem.work
        # Work of the ancestors and of the descendants of each node, each with its own.
        self._before, self._after = reachable.summed(problem.work)
        nets = [net for net in problem.nets if reachable.leads_to(net.pins[0], np.array(net.pins[1:])).all()]
        self._seconds = np.array([net.seconds for net in nets])
        self._makers: Ints = np.array([net.pins[0] for net in nets], dtype=np.int64)
        self._uses: Ints = np.array([use for net in nets for use in net.pins[1:]], dtype=np.int64)
        self._net_of_use: Ints = np.repeat(np.arange(len(nets)), [len(net.pins) - 1 for net in nets])
        order = [(b, a) for a, others in enumerate(problem.successors) for b in others]
        self._order: Ints = np.array(order, dtype=np.int64).reshape(-1, 2).T
        self._nodes, self._source, self._sink = nodes, nodes + len(nets), nodes + len(nets) + 1

    def least(
        self, low: float, high: float, used_before: float = math.inf, made_after: float = -math.inf
    ) -> float:
        """Return the least seconds that cross any border with ``low`` to ``high`` of work before it.

        Nodes with more than ``high`` of work among their ancestors are behind each border in the range; those with
        too little behind them are before it. A price on work draws the cut into the range; the value less the price is
        a bound for any price (Lagrangian relaxation). Infinite if some node would have to be on both sides.

        Args:
            low, high: the range.
            used_before: count a use of a tensor only if it is before each border with that much work before it.
            made_after: count a tensor only if it is made behind each border with that much work before it.
        """
        slack = SLACK * self.total
        outside = self._before > high + slack
        inside = self.total - self._after < low - slack
        if (outside & inside).any():
            return math.inf
        made = self._before[self._makers] > made_after + slack
        counts = made[self._net_of_use] & (self.total - self._after[self._uses] < used_before - slack)
        nets = np.unique(self._net_of_use[counts])
        tails = np.concatenate([self._order[0], self._nodes + self._net_of_use[counts], self._makers[nets]])
        heads = np.concatenate([self._order[1], self._uses[counts], self._nodes + nets])
        place = np.arange(self._sink + 1)
        place[: self._nodes][outside], place[: self._nodes][inside] = self._sink, self._source
        return self._priced(place, place[np.stack([tails, heads])], self._seconds[nets], low, high)

    def _priced(self, place: Ints, arcs: Ints, seconds: Floats, low: float, high: float) -> float:
        """Return the best bound of a few prices. The last arcs are those of the tensors, with their seconds."""
        is_open = place[: self._nodes] == np.arange(self._nodes)
        open_work = np.where(is_open, self._work, 0.0)
        certain = float(self._work[place[: self._nodes] == self._source].sum())
        scale = float(open_work.sum())
        step = float(seconds.mean()) / scale if scale and len(seconds) else 0.0
        best, price = 0.0, 0.0
        short: tuple[float, float] | None = (
            None  # work and crossing of the best borders below and above the range
        )
        long: tuple[float, float] | None = None
        for _ in range(PRICES):
            value, work = self._cut(arcs, seconds, price * open_work, is_open)
            value, work = value + price * certain, work + certain
            best = max(best, value - price * (high if price > 0 else low))
            if low <= work <= high:
                break
            if work > high:
                long = work, value - price * work
            else:
                short = work, value - price * work
            if short and long:
                # At this price both are equally good, and any better one is between them.
                price = (short[1] - long[1]) / (long[0] - short[0])
            else:
                price, step = price + (step if long else -step), 4 * step
        return best

    def _cut(
        self, arcs: Ints, seconds: Floats, prices: Floats, is_open: NDArray[np.bool_]
    ) -> tuple[float, float]:
        """Return the least crossing plus prices of the nodes inside, and the work inside, both of open nodes only.

        A price is an arc to the sink; a negative one is paid from the start, and an arc from the source refunds it.
        """
        unit = max(float(seconds.sum() + np.abs(prices).sum()), 1e-300) / UNITS
        nodes = np.flatnonzero(prices)
        ends = np.where(prices[nodes] > 0, self._sink, self._source)
        paid = np.stack([np.where(prices[nodes] > 0, nodes, ends), np.where(prices[nodes] > 0, ends, nodes)])
        tails, heads = np.hstack([arcs, paid])
        finite = np.rint(np.append(seconds, np.abs(prices[nodes])) / unit).astype(np.int64)
        limits = np.append(np.full(len(tails) - len(finite), INFINITE), finite)
        used = (tails != heads) & (tails != self._sink) & (heads != self._source)
        size = self._sink + 1
        summed = csr_array((limits[used], (tails[used], heads[used])), shape=(size, size))
        summed.data = np.minimum(summed.data, INFINITE)
        network = summed.astype(np.int32)
        flow = maximum_flow(network, self._source, self._sink)
        left = csr_array(network - flow.flow)
        left.eliminate_zeros()
        side: NDArray[np.int32] = breadth_first_order(left, self._source, return_predecessors=False)
        inside = np.zeros(size, dtype=bool)
        inside[side] = True
        # Rounding loses half a unit an arc.
        value = (flow.flow_value - len(finite)) * unit + float(np.minimum(prices, 0.0).sum())
        return value, float(self._work[is_open & inside[: self._nodes]].sum())
