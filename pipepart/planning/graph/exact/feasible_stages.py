"""Finds pairs of borders with one feasible stage between them, for many pairs at once."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from ..problem import Floats, Ints, Problem
from .capacity import SLACK
from .downsets import Downsets
from .incidence import Incidence

# Pairs of borders per numpy call; each takes a few hundred bytes.
CHUNK = 200_000


class FeasibleStages:
    """Finds for each target border a source border such that the nodes between are a stage of at most T seconds.

    The load of the stage between borders I and I' is compute + crossing(I) + crossing(I') - correction. The
    correction is for nets cut at both borders: their seconds once if they have a pin in the stage (each tensor is paid
    once), twice if they have none (a stage does not pay for what passes over it). It is evaluated last, for pairs
    that are too long without it and could be short enough with it.

    Attributes:
        origin: for each target a source, or -1.
    """

    def __init__(
        self,
        problem: Problem,
        sets: Downsets,
        incidence: Incidence,
        targets: Ints,
        device_type: int,
        seconds: float,
    ) -> None:
        self._sets, self._incidence, self._targets = sets, incidence, targets
        self._device, self._type = problem.types[device_type], device_type
        self._limit = seconds * (1 + SLACK)
        self._seconds = sets.seconds[device_type, targets]
        self._crossing = sets.crossing[targets] if self._device.pays else np.zeros(len(targets))
        self._memory_binds = int(sets.bytes[-1]) > self._device.memory
        self._some_banned = bool(sets.banned[device_type, -1])
        self.origin: Ints = np.full(len(targets), -1, dtype=np.int64)

    def look(self, sources: Ints, low: Ints, counts: Ints) -> None:
        """Check, for each source, the ``counts`` targets from ``low`` on."""
        ends = np.cumsum(counts)
        start = 0
        while start < len(sources):
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
            amount = counts[start:stop]
            first = np.repeat(low[start:stop] - np.append(0, np.cumsum(amount)[:-1]), amount)
            self._pairs(np.repeat(sources[start:stop], amount), first + np.arange(len(first)))
            start = stop

    def _pairs(self, sources: Ints, places: Ints) -> None:
        sets, device_type = self._sets, self._type

        def narrow(kept: NDArray[np.bool_], *arrays: NDArray) -> list[NDArray]:
            return [array[kept] for array in arrays]

        sources, places = narrow(self.origin[places] < 0, sources, places)
        load = self._seconds[places] - sets.seconds[device_type, sources]
        crossing = sets.crossing[sources] if self._device.pays else np.zeros(len(sources))
        # A net that crosses one of the two borders is cut by the stage.
        near = load + np.abs(self._crossing[places] - crossing) <= self._limit
        near &= self._fits(sources, self._targets[places])
        sources, places, load, crossing = narrow(near, sources, places, load, crossing)
        inside = sets.inside(sources, self._targets[places])
        sources, places, load, crossing = narrow(inside, sources, places, load, crossing)
        most = load + self._crossing[places] + crossing
        sure = most <= self._limit
        self.origin[places[sure]] = sources[sure]
        self._correct(*narrow(~sure & (self.origin[places] < 0), sources, places, most))

    def _correct(self, sources: Ints, places: Ints, most: Floats) -> None:
        """Apply the correction to pairs whose load without it is ``most``."""
        if not len(sources):
            return
        starts = np.nonzero(np.append(True, sources[1:] != sources[:-1]))[0]
        for low, high in itertools.pairwise([*starts.tolist(), len(sources)]):
            todo = low + np.nonzero(self.origin[places[low:high]] < 0)[0]
            if len(todo):
                source = int(sources[low])
                relief = self._incidence.cut_twice(source, self._targets[places[todo]])
                self.origin[places[todo[most[todo] - relief <= self._limit]]] = source

    def _fits(self, sources: Ints, rows: Ints) -> NDArray[np.bool_]:
        """Return which pairs have nodes between them that may run on the device and fit its memory."""
        sets = self._sets
        result = np.ones(len(rows), dtype=bool)
        if self._memory_binds:
            result &= sets.bytes[rows] - sets.bytes[sources] <= self._device.memory
        if self._some_banned:
            result &= sets.banned[self._type, rows] == sets.banned[self._type, sources]
        return result
