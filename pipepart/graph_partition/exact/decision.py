"""Decider: finds a cut with a bottleneck of at most T seconds, or proves that none of the given borders forms one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from schedules.searching.clock import Clock

from ..problem import Floats, Ints, Problem, Split
from .capacity import SLACK, Capacity
from .dominance import Dominance
from .downsets import Downsets
from .incidence import Incidence

# Pairs of borders per numpy call. Each pair takes a few hundred bytes.
CHUNK = 200_000


class TooMuchWork(Exception):
    """The decision needs more pairs of borders than the limit allows."""


@dataclass
class _Reached:
    """The borders reached in one device state, each with the previous border of the cut."""

    rows: list[Ints] = field(default_factory=list)
    origins: list[Ints] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)

    def add(self, rows: Ints, origins: Ints, state: int, device_type: int) -> None:
        """Add the borders ``rows``: one stage on ``device_type`` after their ``origins``, reached in ``state``."""
        if len(rows):
            self.rows.append(rows)
            self.origins.append(origins)
            self.states.append(state)
            self.types.append(device_type)

    def origin(self, row: int) -> tuple[int, int, int]:
        """Return the border before ``row``, its state, and the device type of the stage between them."""
        for rows, origins, state, device_type in zip(
            self.rows, self.origins, self.states, self.types, strict=True
        ):
            places = np.nonzero(rows == row)[0]
            if len(places):
                return int(origins[places[0]]), state, device_type
        raise LookupError(f"border {row} was not reached")


class Decider:
    """Decides whether there is a cut with a bottleneck of at most T seconds whose borders are among given downsets.

    The empty border is reached in the state in which all devices are available. If border I is reached in a state and
    I' \\ I is a stage of at most T seconds on an available device, border I' is reached in the state without that
    device. States are visited in order, so the search includes the order of devices of different types. A border that
    was reached with a set of devices is not reached again with a larger set.

    Takes O(states x pairs of borders that capacity allows). Dominance leaves few such pairs.
    """

    def __init__(self, problem: Problem, sets: Downsets, clock: Clock, most_pairs: int) -> None:
        self._problem, self._orders, self._sets = problem, problem.orders, sets
        self._incidence = Incidence(problem, sets)
        self._dominance = Dominance(problem, sets, self._incidence)
        self._left_pairs = most_pairs
        self._clock = clock
        # Total memory of the available devices in each state; as Python integers, since sums may exceed 64 bits.
        self._memory = [
            sum(int(count) * kind.memory for count, kind in zip(row, problem.types, strict=True))
            for row in self._orders.available
        ]

    def split(self, seconds: float) -> Split | None:
        """Return a cut with a bottleneck of at most ``seconds``, or None if there is none.

        Raises:
            TooMuchWork: the limit on pairs of borders is reached.
            OutOfTime: the time limit is over.
        """
        orders, capacity = self._orders, Capacity(self._problem, seconds)
        reached = np.zeros((len(orders.available), len(self._sets)), dtype=bool)
        borders = [_Reached() for _ in reached]
        reached[-1, 0] = True
        borders[-1].add(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), -1, -1)
        for state in range(len(reached) - 1, -1, -1):
            if not borders[state].rows:
                continue
            fresh = np.concatenate(borders[state].rows)
            sources = self._dominance.undominated(fresh, np.nonzero(reached[state])[0], self._clock)
            for edge in np.nonzero(orders.state == state)[0]:
                device_type, target = int(orders.type[edge]), int(orders.rest[edge])
                reached[target] |= reached[state]
                targets = np.nonzero(self._eligible(capacity, target) & ~reached[target])[0]
                rows, origins = self._stages(sources, targets, device_type, capacity)
                reached[target, rows] = True
                borders[target].add(rows, origins, state, device_type)
                if reached[target, -1]:
                    return self._trace(borders, target)
        return None

    def _eligible(self, capacity: Capacity, state: int) -> NDArray[np.bool_]:
        """Return whether the available devices in ``state`` have capacity for all nodes after each border, [sets]."""
        sets = self._sets
        need = capacity.prefix_work[-1] - sets.work
        if capacity.pays[state]:
            need = need + capacity.transfer_weight * sets.crossing
        fits = sets.bytes[-1] - sets.bytes <= self._memory[state]
        return fits & (need <= capacity.total[state] + SLACK * capacity.total[-1])

    def _stages(
        self, sources: Ints, targets: Ints, device_type: int, capacity: Capacity
    ) -> tuple[Ints, Ints]:
        """Return the targets that one stage on ``device_type`` separates from some source, and that source for each."""
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
        origin = _origins(
            self._problem,
            self._sets,
            self._incidence,
            (sources, low, counts),
            targets,
            device_type,
            capacity,
            self._clock,
        )
        return targets[origin >= 0], origin[origin >= 0]

    def _trace(self, reached: list[_Reached], state: int) -> Split:
        row = len(self._sets) - 1
        borders, types = [row], []
        while row:
            row, state, device_type = reached[state].origin(row)
            borders.append(row)
            types.append(device_type)
        inside = self._incidence.unpacked(np.array(borders[::-1]))
        # A node is in the stage after the last border that does not contain it.
        stage_of = (~inside).sum(axis=0) - 1
        return Split(tuple(stage_of.tolist()), tuple(types[::-1]))


def _origins(
    problem: Problem,
    sets: Downsets,
    incidence: Incidence,
    pairs: tuple[Ints, Ints, Ints],
    targets: Ints,
    device_type: int,
    capacity: Capacity,
    clock: Clock,
) -> Ints:
    """Return for each target a source such that the nodes between both are a feasible stage, or -1.

    The load of the stage between borders I and I' is compute + crossing(I) + crossing(I') - correction. The correction
    is for nets cut at both borders: their seconds if they have a pin in the stage, because a tensor counts once per
    stage; twice their seconds otherwise, because a tensor does not count in stages that it skips. The correction is
    computed last, only for pairs that exceed the limit without it.

    Args:
        problem: the graph and the devices.
        sets: the downsets that the borders index.
        incidence: the nets of these downsets.
        pairs: the sources; for each source, the index in ``targets`` of the first target to check, and the number of
            targets to check.
        targets: borders that may end a stage.
        device_type: device type of the stage.
        capacity: the capacity for a bottleneck of T seconds.
        clock: raises OutOfTime between chunks of pairs.
    """
    device, limit = problem.types[device_type], capacity.seconds * (1 + SLACK)
    seconds = sets.seconds[device_type]
    crossing = sets.crossing if device.pays else np.zeros(len(sets))
    memory_binds = int(sets.bytes[-1]) > device.memory
    banned = sets.banned[device_type]
    origin = np.full(len(targets), -1, dtype=np.int64)
    all_sources, low, counts = pairs
    ends = np.cumsum(counts)
    start = 0
    while start < len(all_sources):
        clock.check()
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
        amount = counts[start:stop]
        first = np.repeat(low[start:stop] - np.append(0, np.cumsum(amount)[:-1]), amount)
        sources, places = np.repeat(all_sources[start:stop], amount), first + np.arange(len(first))
        start = stop

        possible = origin[places] < 0
        sources, places = sources[possible], places[possible]
        rows = targets[places]
        load = seconds[rows] - seconds[sources]
        # A lower bound of the load: a net that crosses only one of the two borders is cut by the stage.
        possible = load + np.abs(crossing[rows] - crossing[sources]) <= limit
        if memory_binds:
            possible &= sets.bytes[rows] - sets.bytes[sources] <= device.memory
        if banned[-1]:
            possible &= banned[rows] == banned[sources]
        sources, places, load = sources[possible], places[possible], load[possible]
        possible = sets.inside(sources, targets[places])
        sources, places, load = sources[possible], places[possible], load[possible]
        load = load + crossing[targets[places]] + crossing[sources]
        sure = load <= limit
        origin[places[sure]] = sources[sure]
        possible = ~sure & (origin[places] < 0)
        sources, places, load = sources[possible], places[possible], load[possible]
        for begin, end in itertools.pairwise(_groups(sources)):
            clock.check()
            todo = begin + np.nonzero(origin[places[begin:end]] < 0)[0]
            if len(todo):
                source = int(sources[begin])
                relief: Floats = incidence.cut_twice(source, targets[places[todo]])
                origin[places[todo[load[todo] - relief <= limit]]] = source
    return origin


def _groups(values: Ints) -> list[int]:
    """Return where each run of equal values begins, and the end."""
    if not len(values):
        return []
    return [0, *(np.nonzero(values[1:] != values[:-1])[0] + 1).tolist(), len(values)]
