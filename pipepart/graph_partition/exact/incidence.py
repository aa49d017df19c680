"""Incidence: which nets have pins at which nodes, and the nets that both borders of a stage cut."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ..problem import Floats, Ints, Problem
from .downsets import Downsets


class Incidence:
    """The incidence matrix of nodes and nets, with queries for downsets."""

    def __init__(self, problem: Problem, sets: Downsets) -> None:
        self._sets = sets
        pins = np.array([pin for net in problem.nets for pin in net.pins], dtype=np.int64)
        owners = np.repeat(np.arange(len(problem.nets)), [len(net.pins) for net in problem.nets])
        shape = (len(problem), len(problem.nets))
        self.matrix = csr_array((np.ones(len(pins)), (pins, owners)), shape=shape)
        self.costs: Floats = np.array([net.seconds for net in problem.nets])
        self.sizes: Ints = np.array([len(net.pins) for net in problem.nets], dtype=np.int64)
        self._pins = [np.array(net.pins) for net in problem.nets]
        self._lasts = np.array([net.pins[-1] for net in problem.nets], dtype=np.int64)
        self._firsts = np.array([net.pins[0] for net in problem.nets], dtype=np.int64)
        self._nodes = len(problem)
        self._masks = [sum(1 << pin for pin in net.pins) for net in problem.nets]
        self._left: dict[int, dict[tuple[tuple[int, np.uint64], ...], float]] = {}

    def unpacked(self, rows: Ints, low: int = 0, high: int | None = None) -> NDArray[np.bool_]:
        """Return which nodes from ``low`` to ``high`` each set contains; bool, [rows, nodes]."""
        end = self._nodes if high is None else high
        words = self._sets.words[rows, low >> 6 : (end + 63) >> 6].astype("<u8")
        flags = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        start = low & ~63
        return flags[:, low - start : end - start].astype(bool)

    def pins_before(self, node: int, nets: Ints) -> Ints:
        """Return the number of pins before ``node`` for each net, [nets]."""
        return np.array([int(np.searchsorted(self._pins[net], node)) for net in nets], dtype=np.int64)

    def cut_twice(self, source: int, rows: Ints) -> Floats:
        """Return crossing(source) + crossing(row) minus the transfers of the stage between, in seconds, [rows].

        A net that both borders cut counts once if it has a pin in the stage, otherwise not at all.
        """
        relief = np.zeros(len(rows))
        words = self._sets.words
        for left, seconds in self._pins_left(source).items():
            full, none = np.ones(len(rows), dtype=bool), np.ones(len(rows), dtype=bool)
            for word, mask in left:
                contained = words[rows, word] & mask
                full &= contained == mask
                none &= contained == 0
            relief += seconds * (1.0 - full + none)
        return relief

    def _pins_left(self, source: int) -> dict[tuple[tuple[int, np.uint64], ...], float]:
        """Return the seconds of the nets that a set cuts, by their pins outside the set as masks of words."""
        if source in self._left:
            return self._left[source]
        inside = self.unpacked(np.array([source]))[0]
        contained = int.from_bytes(self._sets.words[source].astype("<u8").tobytes(), "little")
        # A cut net has its first pin at or before the last node inside, and its last pin at or after the first outside.
        last = self._nodes - 1 - int(inside[::-1].argmax()) if inside.any() else -1
        first = int((~inside).argmax())
        seconds_left: dict[int, float] = {}
        for net in np.nonzero((self._firsts <= last) & (self._lasts >= first))[0].tolist():
            left = self._masks[net] & ~contained
            if left and left != self._masks[net]:
                seconds_left[left] = seconds_left.get(left, 0.0) + float(self.costs[net])
        self._left[source] = {_words(left): seconds for left, seconds in seconds_left.items()}
        return self._left[source]


def _words(mask: int) -> tuple[tuple[int, np.uint64], ...]:
    """Return the position and the value of each nonzero word of a mask."""
    count = (mask.bit_length() + 63) >> 6
    parts = ((word, mask >> (64 * word) & 2**64 - 1) for word in range(count))
    return tuple((word, np.uint64(part)) for word, part in parts if part)
