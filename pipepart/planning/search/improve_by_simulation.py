"""Searches the cut with the shortest simulated step, from the cut with the smallest bottleneck on.

With few micro-batches, or slow links, the cut with the smallest bottleneck need not have the shortest step. All cuts
and orders of the devices are simulated if there are few, else neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..costs.cut_costs import Borders
from ..costs.layer_ranges import TOLERANCE
from ..partition.device_orders import device_types, distinct_orders
from ..partition.local_search import climb, neighbours
from ..partition.order_search import neighbour_orders
from ..plan_document import Plan
from .candidate import Candidate
from .step_times import StepTimes

_ALL = 3000  # cuts times orders, up to which every one is simulated
_STEPS = tuple(sign * step for step in (1, 2, 4, 8, 16, 32) for sign in (1, -1))
_PAIR_STEPS = (-1, 1)
_EXCHANGES = 64  # of two unlike devices, the most for each step of a climb
_WORTH = 1e-3  # a climb ends where the next step would shorten the step of the plan by less, relative to it
_BUILT = 8  # plans made of the best cuts, if the step of a plan is not exactly what was simulated
_SHORTER = 1 - TOLERANCE

_Order = tuple[int, ...]


class _Cut(NamedTuple):
    """The seconds of its step, its borders, and the device of each schedule row."""

    step: float
    borders: tuple[int, ...]
    order: _Order


def improve_by_simulation(candidate: Candidate, plan: Plan) -> Plan:
    """Return the plan with the shortest step: ``plan``, or another cut of its candidate."""
    search = _Search(candidate)
    own = search.cut_of(plan)
    found = [cut for cut in search.best_cuts(own) if cut.step < own.step * _SHORTER]
    best = plan
    for cut in found:
        made = candidate.plan_for_cut(cut.borders, cut.order, plan.predicted.bottleneck_bound)
        if made and made.predicted.step_seconds < best.predicted.step_seconds * _SHORTER:
            best = made
        if (
            candidate.groups.replicas == 1
        ):  # with replicas, one is simulated without the sums of the gradients
            break
    return best


class _Search:
    """The cuts of one candidate, on any order of the devices."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate, self._cuts = candidate, candidate.cut_costs
        self._times = StepTimes(candidate.costs, self._cuts, candidate.bare_schedule)
        self._allowed = candidate.costs.allowed_borders

    def cut_of(self, plan: Plan) -> _Cut:
        """Return the cut of a plan, simulated."""
        position = {device.name: index for index, device in enumerate(self._candidate.cluster.devices)}
        ends = list(itertools.accumulate(len(stage.layers) for stage in plan.stages))
        order = tuple(position[device.name] for device in plan.first_replica.workers)
        borders = np.array([ends[:-1]], dtype=np.int64).reshape(1, -1)
        return self._simulated([(order, borders)])[0]

    def best_cuts(self, own: _Cut) -> list[_Cut]:
        """Return the best cuts of all, if there are few, else the one that climbing from ``own`` leads to."""
        inner = len(self._cuts.rows) - 1
        count = math.comb(len(self._allowed), inner)
        all_orders = distinct_orders(self._candidate.cluster, self._candidate.devices)
        orders = list(itertools.islice(all_orders, _ALL // max(count, 1) + 1))
        if count * len(orders) > _ALL:
            return [climb(own, self._better)]
        cuts = list(itertools.combinations(self._allowed.tolist(), inner))
        borders = np.array(cuts, dtype=np.int64).reshape(len(cuts), inner)
        return self._simulated([(order, borders) for order in orders])

    def _better(self, here: _Cut) -> _Cut | None:
        found = self._simulated(list(self._near(here)))
        return found[0] if found and found[0].step < here.step * (1 - _WORTH) else None

    def _near(self, here: _Cut) -> Iterator[tuple[_Order, Borders]]:
        """Cuts with a border or two moved, and orders with two unlike devices exchanged."""
        borders = np.array(here.borders, dtype=np.int64)
        yield here.order, neighbours(borders, self._allowed, _STEPS, _PAIR_STEPS)
        near = np.vstack([borders, neighbours(borders, self._allowed, _STEPS[:4], ())])
        types = device_types(self._candidate.cluster)
        for order in itertools.islice(neighbour_orders(here.order, types), _EXCHANGES):
            yield order, near

    def _simulated(self, cases: list[tuple[_Order, Borders]]) -> list[_Cut]:
        """Return the cuts that fit their devices and keep all pins, the shortest step first."""
        fitting, columns = [], []
        for order, borders in cases:
            allowed = self._candidate.constraints.allowed(borders)
            table = self._cuts.of(allowed)
            fits = (table.deficits(order) <= 0).all(axis=1)
            if fits.any():
                columns.append(self._times.columns(allowed[fits], table.choices(order)[fits], order))
                fitting += [(row, order) for row in allowed[fits]]
        if not fitting:
            return []
        steps = self._times.steps(columns)
        best = np.argsort(steps, kind="stable")[:_BUILT]
        return [_Cut(float(steps[at]), tuple(fitting[at][0].tolist()), fitting[at][1]) for at in best]
