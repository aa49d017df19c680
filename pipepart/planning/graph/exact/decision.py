"""Decides whether some cut has a bottleneck of at most T seconds: reachable borders, device by device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..device_states import Walk
from ..incidence import Incidence
from ..problem import Ints, Problem, Split
from .dominance import Dominance
from .ideals import Downsets
from .links import Links
from .spans import levels
from .windows import SLACK, Windows

# Targets of one source that are worth a pass of their own.
MANY = 800


class TooMuchWork(Exception):
    """The decision would look at more pairs of borders than it was given."""


@dataclass
class _Reached:
    """Borders reached in one state of the walk, and from where."""

    rows: list[Ints] = field(default_factory=list)
    origins: list[Ints] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)

    def add(self, rows: Ints, origins: Ints, state: int, kind: int) -> None:
        """Records that ``rows`` are one stage on a device of type ``kind`` behind ``origins``, reached in ``state``."""
        if len(rows):
            self.rows.append(rows)
            self.origins.append(origins)
            self.states.append(state)
            self.types.append(kind)

    def origin(self, row: int) -> tuple[int, int, int]:
        """The border before ``row``, the state it was reached in, and the type of device between."""
        for rows, origins, state, kind in zip(self.rows, self.origins, self.states, self.types, strict=True):
            places = np.nonzero(rows == row)[0]
            if len(places):
                return int(origins[places[0]]), state, kind
        raise LookupError(f"border {row} was not reached")


class Decider:
    """Asks for cuts of one problem whose borders are among given downsets.

    A border ``I`` is reached with some devices used if it is empty, or a border inside it is reached with one device
    fewer and the nodes between are a stage of at most T seconds that fits this device. What is reached is kept for
    each state of the walk over the devices, so the order of unlike devices is part of the search; a border reached
    with fewer devices is not looked at again with more.

    The load of the stage between two borders is compute + crossing(I) + crossing(I'), less what is cut at both: once
    for a tensor that has a pin between, twice for one that has none. Only pairs that need it pay for that correction.
    """

    def __init__(self, problem: Problem, walk: Walk, sets: Downsets, most_pairs: int = 10**12) -> None:
        self._problem, self._walk, self._sets = problem, walk, sets
        self._incidence = Incidence(problem, sets)
        self._dominance = Dominance(problem, sets, self._incidence)
        self._left_pairs = most_pairs
        self._memory = _free_memory(problem, walk)
        self._steps: list[list[tuple[int, int]]] = [[] for _ in range(len(walk))]
        for kind, (before, after) in enumerate(walk.moves):
            for state, target in zip(before.tolist(), after.tolist(), strict=True):
                self._steps[state].append((kind, target))

    def split(self, seconds: float) -> Split | None:
        """A cut whose bottleneck is at most ``seconds``, or None: there is none.

        Raises:
            TooMuchWork: the pairs granted to this decider are spent.
        """
        windows = Windows(self._problem, self._walk, seconds)
        ahead, behind = levels(self._sets.work, self._sets.near, self._sets.limit, windows)
        if ahead[-1] > windows.devices:
            return None
        reached = np.zeros((len(self._walk), len(self._sets)), dtype=bool)
        found = [_Reached() for _ in range(len(self._walk))]
        reached[0, 0] = True
        found[0].add(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), -1, -1)
        for state in range(len(self._walk)):
            if not found[state].rows:
                continue
            news = np.concatenate(found[state].rows)
            sources = self._dominance.undominated(news, np.nonzero(reached[state])[0])
            for kind, target in self._steps[state]:
                reached[target] |= reached[state]
                free = int(self._walk.free[target].sum())
                useful = (behind <= free) & (ahead <= windows.devices - free) & ~reached[target]
                open_targets = np.nonzero(self._eligible(windows, target) & useful)[0]
                rows, origins = self._stages(sources, open_targets, kind, windows)
                reached[target, rows] = True
                found[target].add(rows, origins, state, kind)
                if reached[target, -1]:
                    return self._trace(found, target)
        return None

    def _eligible(self, windows: Windows, state: int) -> NDArray[np.bool_]:
        """Borders behind which the devices that are free in ``state`` have room for the rest."""
        sets = self._sets
        need = windows.mass[-1] - sets.work
        if windows.pays[state]:
            need = need + windows.charge * sets.crossing
        fits = sets.bytes[-1] - sets.bytes <= self._memory[state]
        return fits & (need <= windows.room[state] + SLACK * windows.room[0])

    def _stages(self, sources: Ints, targets: Ints, kind: int, windows: Windows) -> tuple[Ints, Ints]:
        """The targets that are one stage on a device of type ``kind`` behind a source, and for each such a source."""
        work = self._sets.work
        goals = work[targets]
        limit = work[sources] + windows.reach[kind] * (1 + SLACK) + SLACK * windows.mass[-1]
        low = np.searchsorted(goals, work[sources])
        counts = np.maximum(np.searchsorted(goals, limit, side="right") - low, 0)
        self._left_pairs -= int(counts.sum())
        if self._left_pairs < 0:
            raise TooMuchWork
        links = Links(self._problem, self._sets, self._incidence, targets, kind, windows.seconds)
        many = counts >= MANY
        for source, start, amount in zip(
            sources[many].tolist(), low[many].tolist(), counts[many].tolist(), strict=True
        ):
            links.from_one(source, start, start + amount)
        links.from_several(sources[~many], low[~many], counts[~many])
        hit = links.origin >= 0
        return targets[hit], links.origin[hit]

    def _trace(self, found: list[_Reached], state: int) -> Split:
        row = len(self._sets) - 1
        borders, types = [row], []
        while row:
            row, state, kind = found[state].origin(row)
            borders.append(row)
            types.append(kind)
        inside = self._incidence.unpacked(np.array(borders[::-1]))
        # A node is in the stage behind the last border that does not hold it.
        stage_of = (~inside).sum(axis=0) - 1
        return Split(tuple(stage_of.tolist()), tuple(types[::-1]))


def _free_memory(problem: Problem, walk: Walk) -> list[int]:
    """Bytes that the free devices of each state have together."""
    return [
        sum(int(free) * kind.memory for free, kind in zip(row, problem.types, strict=True))
        for row in walk.free
    ]
