"""Reachability: the ancestors of each node, as a packed row of bits per node."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedules.searching.clock import Clock

from ..problem import Floats, Problem

# Number of rows that are unpacked at once.
CHUNK = 64


class Reachability:
    """The ancestors of each node among the nodes from ``low`` to ``high``; a node is its own ancestor.

    Takes nodes² / 8 bytes: 112 MB for 30,000 nodes.
    """

    def __init__(self, problem: Problem, low: int, high: int) -> None:
        self._size = high - low
        self._bits = np.zeros((self._size, (self._size + 7) >> 3), dtype=np.uint8)
        for node in range(self._size):
            row = self._bits[node]
            for before in problem.predecessors[low + node]:
                if before >= low:
                    row |= self._bits[before - low]
            row[node >> 3] |= 1 << (node & 7)

    def ancestors(self, nodes: int | slice) -> NDArray[np.bool_]:
        """Return whether each node is an ancestor of ``nodes`` or equal to it; bool, [nodes] or [rows, nodes]."""
        return np.unpackbits(self._bits[nodes], axis=-1, count=self._size, bitorder="little").astype(bool)

    def work_behind(self, work: Floats, clock: Clock) -> Floats:
        """Return the work of each node and all its descendants, [nodes]."""
        behind = np.zeros(self._size)
        for start in range(0, self._size, CHUNK):
            clock.check()
            behind += work[start : start + CHUNK] @ self.ancestors(slice(start, start + CHUNK))
        return behind
