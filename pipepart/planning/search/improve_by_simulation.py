"""Searches the cut with the shortest simulated step, from the cuts with the smallest bottlenecks on.

With few micro-batches, or slow links, the cut with the smallest bottleneck need not have the shortest step. All cuts
and orders of the devices are tried if there are few, else neighbours. A lower bound of each step saves most
simulations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from schedules import Kind

from ..costs.stage_memory import Floats
from ..partition.device_orders import distinct_orders
from ..partition.local_search import climb, neighbours
from ..plan_document import Plan
from ..stage_plan import TOLERANCE
from .candidate import Candidate

_Cuts = NDArray[np.int64]  # [cuts, borders]

_ALL = 3000  # cuts times orders, up to which every one is considered
_SIMULATIONS = 200  # otherwise, for neighbours of all plans
_STEPS = (-2, -1, 1, 2)
_PAIR_STEPS = (-1, 1)
_NEAR = 1.05  # relative to the best step: slower plans are not improved
_SHORTER = 1 - TOLERANCE


def improve_by_simulation(best: Plan, found: Sequence[tuple[Candidate, int, Plan]]) -> Plan:
    """Return the plan with the shortest step: ``best``, or another cut of one of the candidates.

    Args:
        best: the fastest of ``found``.
        found: candidates, their numbers of devices, and the plan with the smallest bottleneck of each.
    """
    left = _SIMULATIONS
    for candidate, devices, plan in sorted(found, key=lambda entry: _step(entry[2])):
        space = _Space(candidate, devices, plan)
        if space.is_small:
            best = space.best_of(space.all(), best)[0]
        elif left > 0 and _step(plan) <= _step(best) * _NEAR:
            climbed, simulated = space.climbed(left)
            best = climbed if _step(climbed) < _step(best) * _SHORTER else best
            left -= simulated
    return best


class _Space:
    """The cuts of one candidate for so many devices, on any order of these."""

    def __init__(self, candidate: Candidate, devices: int, plan: Plan) -> None:
        self._candidate, self._devices, self._plan = candidate, devices, plan
        self._costs = candidate.costs
        self._fewest = candidate.costs.micro_batches // candidate.groups.replicas  # of any copy of the model
        self._rows = np.array(candidate.placement(devices))
        self._fused = all(
            leaf.kind is not Kind.W
            for row in plan.build_schedule().actions
            for one in row
            for leaf in one.leaves
        )
        self._allowed_borders = self._costs.allowed_borders
        self._orders = list(itertools.islice(distinct_orders(candidate.cluster, devices), _ALL + 1))

    @property
    def is_small(self) -> bool:
        """Whether every cut can be looked at."""
        return math.comb(len(self._allowed_borders), len(self._rows) - 1) * len(self._orders) <= _ALL

    def all(self) -> Iterator[tuple[tuple[int, ...], _Cuts]]:
        """Every order with every cut."""
        inner = len(self._rows) - 1
        cuts = list(itertools.combinations(self._allowed_borders.tolist(), inner))
        borders = np.array(cuts, dtype=np.int64).reshape(len(cuts), inner)
        borders = self._candidate.constraints.allowed(borders)
        return ((order, borders) for order in self._orders)

    def climbed(self, most: int) -> tuple[Plan, int]:
        """Climb from the candidate's plan to better neighbours; return the plan and the number of simulations."""
        left = most

        def better(here: Plan) -> Plan | None:
            nonlocal left
            found, simulated = self.best_of(self._near(here), here, left)
            left -= simulated
            return None if found is here else found

        return climb(self._plan, better), most - left

    def best_of(
        self, candidates: Iterator[tuple[tuple[int, ...], _Cuts]], best: Plan, limit: int | None = None
    ) -> tuple[Plan, int]:
        """The best of some cuts, those that promise most tried first, or ``best``; and how many were simulated."""
        listed = [(order, borders, self._bounds(order, borders)) for order, borders in candidates]
        promising = sorted(
            (float(bounds[index]), number, index)
            for number, (_, _, bounds) in enumerate(listed)
            for index in np.flatnonzero(bounds < _step(best) * _SHORTER).tolist()
        )
        simulated = 0
        for bound, number, index in promising[:limit]:
            if bound >= _step(best) * _SHORTER:
                break
            order, borders, _ = listed[number]
            simulated += 1
            made = self._candidate.plan_for_cut(
                (0, *borders[index].tolist()),
                tuple(order[row] for row in self._rows),
                self._devices,
                self._plan.predicted.bottleneck_bound,
            )
            if made is not None and _step(made) < _step(best) * _SHORTER:
                best = made
        return best, simulated

    def _near(self, plan: Plan) -> Iterator[tuple[tuple[int, ...], _Cuts]]:
        """Cuts with a border or two moved by one or two places, and orders with two devices exchanged."""
        index = {info.name: position for position, info in enumerate(self._candidate.profile.layers)}
        borders = np.array([index[stage.layers[0]] for stage in plan.stages[1:]], dtype=np.int64)
        index_of = {device.name: position for position, device in enumerate(self._candidate.cluster.devices)}
        order = tuple(index_of[device.name] for device in plan.workers[: self._devices])
        yield order, self._moved(borders, _PAIR_STEPS)
        for one, other in itertools.combinations(range(len(self._candidate.cluster)), 2):
            exchanged = {one: other, other: one}
            swapped = tuple(exchanged.get(index, index) for index in order)
            if swapped != order:
                yield swapped, np.vstack([borders, self._moved(borders, ())])

    def _moved(self, borders: _Cuts, pair_steps: Sequence[int]) -> _Cuts:
        near = neighbours(borders, self._allowed_borders, _STEPS, pair_steps)
        return self._candidate.constraints.allowed(near)

    def _bounds(self, order: Sequence[int], borders: _Cuts) -> Floats:
        """What the step of each cut cannot be shorter than.

        A device has all micro-batches of its stages to do. It begins once the first has come through the stages before
        its own, and when it is done the last still has their backwards before it; those of a schedule that puts off
        its weight gradients may be done meanwhile.
        """
        costs, cluster = self._costs, self._candidate.cluster
        ends = np.full((len(borders), 1), costs.layers)
        edges = np.hstack([np.zeros_like(ends), borders, ends])
        device_indices = [order[row] for row in self._rows]
        pace = 1 / np.array([cluster.devices[index].speed for index in device_indices])
        seconds = np.diff(costs.compute_sums[edges], axis=1) * pace
        forward = np.diff(costs.forward_sums[edges], axis=1) * pace
        crossing = np.zeros_like(seconds)  # in front of each stage, there and back
        for stage, (one, other) in enumerate(itertools.pairwise(device_indices)):
            link = cluster.link_between(cluster.devices[one].name, cluster.devices[other].name)
            crossing[:, stage + 1] = costs.border_seconds(link)[borders[:, stage]] if one != other else 0.0
        around = seconds if self._fused else forward
        before = np.cumsum(around, axis=1) - around
        before += np.cumsum(crossing if self._fused else crossing / 2, axis=1)
        found = np.zeros(len(borders))
        for row in range(self._devices):
            own = np.flatnonzero(self._rows == row)
            busy = seconds[:, own].sum(axis=1) * self._fewest
            found = np.maximum(found, before[:, own[0]] + busy)
        return found


def _step(plan: Plan) -> float:
    return plan.predicted.step_seconds
