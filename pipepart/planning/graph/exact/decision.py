"""Decider: whether some cut has a bottleneck of at most T seconds, by reachable borders, device by device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..device_states import DeviceStates
from ..problem import Ints, Problem, Split
from .capacity import SLACK, Capacity
from .dominance import Dominance
from .downsets import Downsets
from .feasible_stages import FeasibleStages
from .incidence import Incidence


class TooMuchWork(Exception):
    """The decision needs more pairs of borders than the limit allows."""


@dataclass
class _Reached:
    """The borders reached in one device state, each with the border before it."""

    rows: list[Ints] = field(default_factory=list)
    origins: list[Ints] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)

    def add(self, rows: Ints, origins: Ints, state: int, device_type: int) -> None:
        """Record that one stage on this device type leads from ``origins``, reached in ``state``, to ``rows``."""
        if len(rows):
            self.rows.append(rows)
            self.origins.append(origins)
            self.states.append(state)
            self.types.append(device_type)

    def origin(self, row: int) -> tuple[int, int, int]:
        """Return the border before ``row``, its state, and the type of the device of the stage between them."""
        for rows, origins, state, device_type in zip(
            self.rows, self.origins, self.states, self.types, strict=True
        ):
            places = np.nonzero(rows == row)[0]
            if len(places):
                return int(origins[places[0]]), state, device_type
        raise LookupError(f"border {row} was not reached")


class Decider:
    """Answers whether there is a cut of at most T seconds whose borders are among given downsets.

    The empty border is reached in state 0. A border I' is reached in the state that follows by taking a device, if a
    border I inside it is reached before and I' \\ I is a stage of at most T seconds on that device. States are visited
    in order, so the order of unlike devices is part of the search. A border that was reached with a set of devices is
    not reached again with a larger one.

    Takes O(states x pairs of borders that capacity allows); dominance makes these few.
    """

    def __init__(
        self, problem: Problem, states: DeviceStates, sets: Downsets, most_pairs: int = 10**12
    ) -> None:
        self._problem, self._states, self._sets = problem, states, sets
        self._incidence = Incidence(problem, sets)
        self._dominance = Dominance(problem, sets, self._incidence)
        self._left_pairs = most_pairs
        self._memory = _free_memory(problem, states)
        self._steps = states.steps()

    def split(self, seconds: float) -> Split | None:
        """Return a cut with a bottleneck of at most ``seconds``, or None if there is none.

        Raises:
            TooMuchWork: the limit on pairs of borders is reached.
        """
        capacity = Capacity(self._problem, self._states, seconds)
        reached = np.zeros((len(self._states), len(self._sets)), dtype=bool)
        found = [_Reached() for _ in range(len(self._states))]
        reached[0, 0] = True
        found[0].add(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), -1, -1)
        for state in range(len(self._states)):
            if not found[state].rows:
                continue
            news = np.concatenate(found[state].rows)
            sources = self._dominance.undominated(news, np.nonzero(reached[state])[0])
            for device_type, target in self._steps[state]:
                reached[target] |= reached[state]
                open_targets = np.nonzero(self._eligible(capacity, target) & ~reached[target])[0]
                rows, origins = self._stages(sources, open_targets, device_type, capacity)
                reached[target, rows] = True
                found[target].add(rows, origins, state, device_type)
                if reached[target, -1]:
                    return self._trace(found, target)
        return None

    def _eligible(self, capacity: Capacity, state: int) -> NDArray[np.bool_]:
        """Return the borders such that the devices available in ``state`` have capacity for all nodes after them."""
        sets = self._sets
        need = capacity.prefix_work[-1] - sets.work
        if capacity.pays[state]:
            need = need + capacity.transfer_weight * sets.crossing
        fits = sets.bytes[-1] - sets.bytes <= self._memory[state]
        return fits & (need <= capacity.total[state] + SLACK * capacity.total[0])

    def _stages(
        self, sources: Ints, targets: Ints, device_type: int, capacity: Capacity
    ) -> tuple[Ints, Ints]:
        """Return the targets that are one stage on a device of that type after a source, and that source for each."""
        work = self._sets.work
        goals = work[targets]
        limit = (
            work[sources]
            + capacity.device_capacity[device_type] * (1 + SLACK)
            + SLACK * capacity.prefix_work[-1]
        )
        low = np.searchsorted(goals, work[sources])
        counts = np.maximum(np.searchsorted(goals, limit, side="right") - low, 0)
        self._left_pairs -= int(counts.sum())
        if self._left_pairs < 0:
            raise TooMuchWork
        stages = FeasibleStages(
            self._problem, self._sets, self._incidence, targets, device_type, capacity.seconds
        )
        stages.look(sources, low, counts)
        hit = stages.origin >= 0
        return targets[hit], stages.origin[hit]

    def _trace(self, found: list[_Reached], state: int) -> Split:
        row = len(self._sets) - 1
        borders, types = [row], []
        while row:
            row, state, device_type = found[state].origin(row)
            borders.append(row)
            types.append(device_type)
        inside = self._incidence.unpacked(np.array(borders[::-1]))
        # A node is in the stage after the last border that does not contain it.
        stage_of = (~inside).sum(axis=0) - 1
        return Split(tuple(stage_of.tolist()), tuple(types[::-1]))


def _free_memory(problem: Problem, states: DeviceStates) -> list[int]:
    """Bytes that the free devices of each state have together."""
    return [
        sum(int(free) * device_type.memory for free, device_type in zip(row, problem.types, strict=True))
        for row in states.available
    ]
