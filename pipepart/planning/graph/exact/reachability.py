"""Reachability: which nodes lead to which, as one packed row of bits per node."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..problem import Floats, Ints, Problem

# Rows that are unpacked at once.
CHUNK = 64


class Reachability:
    """The ancestors of each node among the nodes ``low`` to ``high``, itself included.

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
        """Return whether each node equals or is an ancestor of ``nodes``; bool, shape (nodes,) or (rows, nodes)."""
        return np.unpackbits(self._bits[nodes], axis=-1, count=self._size, bitorder="little").astype(bool)

    def leads_to(self, first: int, others: Ints) -> NDArray[np.bool_]:
        """Return whether ``first`` equals or is an ancestor of each of the others."""
        return (self._bits[others, first >> 3] >> (first & 7) & 1).astype(bool)

    def summed(self, work: Floats) -> tuple[Floats, Floats]:
        """Return for each node the work of its ancestors and the work of its descendants, each with its own work."""
        ahead, behind = np.zeros((2, self._size))
        for start in range(0, self._size, CHUNK):
            part = self.ancestors(slice(start, start + CHUNK)).astype(np.float64)
            ahead[start : start + CHUNK] = part @ work
            behind += work[start : start + CHUNK] @ part
        return ahead, behind
