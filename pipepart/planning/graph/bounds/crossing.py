"""A bound on the bottleneck of any cut, from how little can cross a border at each amount of work before it."""

from __future__ import annotations

import numpy as np

from ..device_states import Walk
from ..exact.spans import Spans
from ..exact.windows import SLACK, Windows
from ..problem import Floats, Problem
from .minimum_cuts import least_crossing, tethers

# Amounts of work that are told apart, and the lengths of stages, as parts of what one device has to do.
STEPS = 40
LENGTHS = (0.35, 0.8)

# The bound is halved in to this fraction.
PRECISION = 1e-4


class Barrier:
    """The least that crosses a border, by the work before it, for stages of several lengths.

    Takes a few minimum cuts of the graph for each of ``STEPS`` amounts of work and each of ``LENGTHS``.
    """

    def __init__(self, problem: Problem, devices: Walk, spans: Spans) -> None:
        self._problem, self._devices = problem, devices
        total = float(problem.work.sum())
        second = Windows(problem, devices, 1.0)
        even = total / float(second.room[0]) * second.longest
        self._edges: Floats = np.linspace(0.0, total, STEPS + 1)
        self._tolls: list[tuple[float, Floats]] = []
        for length in LENGTHS:
            tied = tethers(problem, spans, length * even)
            found = [
                least_crossing(problem, spans, tied, float(low), float(high))
                for low, high in zip(self._edges[:-1], self._edges[1:], strict=True)
            ]
            self._tolls.append((length * even, np.nan_to_num(np.array(found), posinf=0.0)))
            self._exists = np.isfinite(found)

    def bound(self, low: float, high: float) -> float:
        """Seconds that no cut can beat, between two bounds."""
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            if self._possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _possible(self, seconds: float) -> bool:
        """Whether the steps of work could be taken by the devices, with no more crossing than must be.

        A stage from one step of work to another is at least as long as from the end of the first to the beginning of
        the second, and pays at both borders what must cross there for a stage of that length.
        """
        windows = Windows(self._problem, self._devices, seconds)
        room = windows.longest * (1 + SLACK)
        first, last = self._edges[:-1], self._edges[1:]
        length = np.maximum(first[None, :] - last[:, None], 0.0)
        toll = np.zeros_like(length)
        end = np.maximum(self._edges[-1] - last, 0.0)
        start_toll, end_toll = np.zeros(len(first)), np.zeros(len(first))
        for above, tolls in self._tolls:
            pays = length > above
            toll = np.maximum(toll, np.where(pays, tolls[:, None] + tolls[None, :], 0.0))
            start_toll = np.maximum(start_toll, np.where(first > above, tolls, 0.0))
            end_toll = np.maximum(end_toll, np.where(end > above, tolls, 0.0))
        step = (length + windows.charge * toll <= room) | (length <= windows.free)
        step &= np.arange(len(first))[:, None] <= np.arange(len(first))[None, :]
        start = (first + windows.charge * start_toll <= room) | (first <= windows.free)
        finish = (end + windows.charge * end_toll <= room) | (end <= windows.free)
        reached = start & self._exists
        for _ in range(windows.devices - 2):
            reached |= step[reached].any(axis=0) & self._exists
        return bool((reached & finish).any()) or windows.devices == 1 or self._edges[-1] <= room
