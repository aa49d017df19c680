"""Which tensors are cut at which borders."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from .lattice import Downsets
from .problem import Floats, Ints, Problem


class Incidence:
    """Nodes against tensors, and the questions about sets of nodes that it answers."""

    def __init__(self, problem: Problem, sets: Downsets) -> None:
        self._sets = sets
        pins = np.array([pin for net in problem.nets for pin in net.pins], dtype=np.int64)
        owners = np.repeat(np.arange(len(problem.nets)), [len(net.pins) for net in problem.nets])
        shape = (len(problem), len(problem.nets))
        self.matrix = csr_array((np.ones(len(pins)), (pins, owners)), shape=shape)
        self.costs: Floats = np.array([net.seconds for net in problem.nets])
        self.sizes: Ints = np.array([len(net.pins) for net in problem.nets], dtype=np.int64)
        self._pins, self._nets_of = [np.array(net.pins) for net in problem.nets], problem.nets_of
        self._lasts = np.array([net.pins[-1] for net in problem.nets], dtype=np.int64)
        self._firsts = np.array([net.pins[0] for net in problem.nets], dtype=np.int64)
        self._nodes = len(problem)

    def unpacked(self, rows: Ints, low: int = 0, high: int | None = None) -> NDArray[np.bool_]:
        """Which of the nodes from ``low`` to ``high`` the sets hold, shape (rows, nodes)."""
        end = self._nodes if high is None else high
        words = self._sets.words[rows, low >> 6 : (end + 63) >> 6].astype("<u8")
        flags = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        start = low & ~63
        return flags[:, low - start : end - start].astype(bool)

    def pins_before(self, node: int, nets: Ints) -> Ints:
        """How many pins each of the tensors has before a node."""
        return np.array([int(np.searchsorted(self._pins[net], node)) for net in nets], dtype=np.int64)

    def cut_twice(self, source: int, rows: Ints) -> Floats:
        """Seconds that crossing(source) + crossing(row) counts too much for the stage between, for each row.

        A tensor that is cut at both borders counts once where it has a pin in the stage, and else not at all.
        """
        inside = self.unpacked(np.array([source]))[0]
        # Only tensors that begin before the last node inside and end behind the first one outside can be cut.
        last = self._nodes - 1 - int(inside[::-1].argmax()) if inside.any() else -1
        first = int((~inside).argmax())
        near = np.nonzero((self._firsts <= last) & (self._lasts >= first))[0]
        pins = [self._pins[net][~inside[self._pins[net]]] for net in near]
        cut = [i for i, left in enumerate(pins) if 0 < len(left) < len(self._pins[near[i]])]
        if not cut:
            return np.zeros(len(rows))
        left = np.concatenate([pins[i] for i in cut])
        owner = np.repeat(np.arange(len(cut)), [len(pins[i]) for i in cut])
        nodes, place = np.unique(left, return_inverse=True)
        table = np.zeros((len(nodes), len(cut)))
        table[place, owner] = 1.0
        taken = self._sets.holds(rows, nodes) @ table
        costs = self.costs[near[cut]]
        return (taken < table.sum(axis=0)) @ costs + (taken == 0) @ costs
