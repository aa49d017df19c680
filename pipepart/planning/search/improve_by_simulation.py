"""Searches the cuts with the shortest simulated step, from the cut with the smallest bottleneck on.

With few micro-batches, or slow links, the cut with the smallest bottleneck need not have the shortest step. All cuts
and orders of the devices are simulated if there are few, else neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..costs.cut_costs import Borders
from ..partition.chain_dp import ChainCut
from ..partition.device_orders import device_types
from ..partition.local_search import climb, neighbours
from ..partition.order_search import neighbour_orders
from .candidate import Candidate

_STEPS = tuple(sign * step for step in (1, 2, 4, 8, 16, 32) for sign in (1, -1))
_PAIR_STEPS = (-1, 1)
_EXCHANGES = 64  # of two unlike devices, the most for each step of a climb
_WORTH = 1e-3  # a climb ends where the next step would shorten the step of the plan by less, relative to it
_BEST = 8  # cuts that are returned

_Order = tuple[int, ...]


class SimulatedCut(NamedTuple):
    """The seconds of its step, its borders, and the device of each schedule row."""

    step: float
    borders: tuple[int, ...]
    order: _Order


def improve_by_simulation(candidate: Candidate, start: ChainCut) -> list[SimulatedCut]:
    """Return cuts of a candidate with short steps, the shortest first and ``start`` last; pins and memory are kept."""
    search = _Search(candidate)
    borders, order = start.first_layers[1:], candidate.order_of(start)
    own = search.simulated([(order, np.array([borders], dtype=np.int64).reshape(1, -1))])
    if not own:  # its memory is an upper bound for many cuts at once: the plan may still fit
        return [SimulatedCut(math.inf, borders, order)]
    return [*(cut for cut in search.best_cuts(own[0]) if cut.step < own[0].step), own[0]]


class _Search:
    """The cuts of one candidate, on any order of the devices."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate, self._cuts = candidate, candidate.cut_costs
        self._times = candidate.step_times
        self._allowed = candidate.costs.allowed_borders

    def best_cuts(self, own: SimulatedCut) -> list[SimulatedCut]:
        """Return the best cuts of all, if there are few, else the one that climbing from ``own`` leads to."""
        if not self._candidate.tries_every_cut:
            return [climb(own, self._better)]
        inner = self._candidate.stages - 1
        cuts = list(itertools.combinations(self._allowed.tolist(), inner))
        borders = np.array(cuts, dtype=np.int64).reshape(len(cuts), inner)
        return self.simulated([(order, borders) for order in self._candidate.orders])

    def _better(self, here: SimulatedCut) -> SimulatedCut | None:
        found = self.simulated(list(self._near(here)))
        return found[0] if found and found[0].step < here.step * (1 - _WORTH) else None

    def _near(self, here: SimulatedCut) -> Iterator[tuple[_Order, Borders]]:
        """Cuts with a border or two moved, and orders with two unlike devices exchanged."""
        borders = np.array(here.borders, dtype=np.int64)
        yield here.order, neighbours(borders, self._allowed, _STEPS, _PAIR_STEPS)
        near = np.vstack([borders, neighbours(borders, self._allowed, _STEPS[:4], ())])
        types = device_types(self._candidate.cluster)
        for order in itertools.islice(neighbour_orders(here.order, types), _EXCHANGES):
            yield order, near

    def simulated(self, cases: Sequence[tuple[_Order, Borders]]) -> list[SimulatedCut]:
        """Return the cuts that fit their devices and keep all pins, the shortest step first."""
        fitting, columns = [], []
        for order, borders in cases:
            allowed = self._candidate.constraints.allowed(borders)
            if not len(allowed):
                continue
            table = self._cuts.of(allowed)
            fits = (table.deficits(order) <= 0).all(axis=1)
            if fits.any():
                columns.append(self._times.columns(allowed[fits], table.choices(order)[fits], order))
                fitting += [(row, order) for row in allowed[fits]]
        if not fitting:
            return []
        steps = self._times.steps(columns)
        best = np.argsort(steps, kind="stable")[:_BEST]
        return [SimulatedCut(float(steps[at]), tuple(fitting[at][0].tolist()), fitting[at][1]) for at in best]
