"""Bytes of live values that skip layers: those that go past a stage, those that it keeps, and those that wait there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...profiling import Costs, SavedTensor

Ints = NDArray[np.int64]


class Gap(NamedTuple):
    """Layers ``first`` and ``last`` make or use a value, and none between does."""

    first: int
    last: int
    bytes: int


class Past(NamedTuple):
    """A value in many cuts, [cuts] each: the stages it goes from and to, and its bytes; 0 if they are neighbours."""

    source: Ints
    target: Ints
    bytes: Ints


class Skips:
    """The skipping values of a chain at one micro-batch size. False if there are none.

    The methods take the first layer of stages and return one number for each end from ``start + 1`` to ``stop``.

    Args:
        costs: of the layers.
        may_relay: whether links differ, so that stages may relay what they do not use. Then nothing is taken to go
            past a stage, which is an upper bound for seconds and bytes.

    Attributes:
        gaps: between layers that are no neighbours.
        may_relay: as given.
    """

    def __init__(self, costs: Costs, may_relay: bool = False) -> None:
        self.gaps = [
            Gap(first, last, value.bytes)
            for value in costs.skips
            for first, last in pairwise(value.layers)
            if last > first + 1
        ]
        table = np.array(self.gaps, dtype=np.int64).reshape(-1, 3)
        self._first, self._last, self._bytes = table[:, :1], table[:, 1:2], table[:, 2]
        self.may_relay = may_relay
        self._pieces = [_Piece(tensor, may_relay) for tensor in costs.saved if tensor.passed_by]

    def __bool__(self) -> bool:
        return bool(self.gaps or self._pieces)

    def passing(self, start: int, stop: int) -> Ints:
        """Return the bytes that go past the stages. ``ChainCosts.output_bytes`` counts them at both borders."""
        ends = np.arange(start + 1, stop + 1)
        if self.may_relay:
            return np.zeros_like(ends)
        return self._bytes @ ((self._first < start) & (self._last >= ends))

    def kept(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the stash and boundary bytes of memory that values skip in.

        A stage keeps a value that it uses and gets from an earlier stage.
        """
        ends = np.arange(start + 1, stop + 1)
        stash, boundary = np.zeros((2, len(ends)), dtype=np.int64)
        for piece in self._pieces:
            used = piece.next_use(start) < ends
            boundary += piece.bytes * used
            stash += piece.bytes * (used | (piece.next_keeper(start) < ends))
        return stash, boundary

    def waiting(self, start: int, stop: int) -> Ints:
        """Return the bytes that wait on the stages for each micro-batch in flight there, if the next has one layer.

        What a stage sends past the next one waits on its device until the other stage uses it, and the gradient that
        comes back waits there for the stage's own backward. Never both: the one ends before the other begins. Neither
        waits outside the time from the stage's forward to its backward. The longer the next stage, the less goes past
        it: this is an upper bound.
        """
        ends = np.arange(start + 1, stop + 1)
        return self._bytes @ ((self._first >= start) & (self._first < ends) & (self._last > ends))

    def past(self, borders: NDArray[np.int64]) -> list[Past]:
        """Return the values of cuts, [cuts, borders], that may go past stages, one entry for each way of one."""
        found = []
        for first, last, size in self.gaps:
            source, target = (borders <= first).sum(axis=1), (borders <= last).sum(axis=1)
            found.append(Past(source, target, np.where(target > source + 1, size, 0)))
        return found

    def waiting_of(self, borders: NDArray[np.int64]) -> Ints:
        """[cuts, stages]: the bytes of :meth:`waiting` for given cuts, where no stage relays."""
        found = np.zeros((len(borders), borders.shape[1] + 1), dtype=np.int64)
        for source, _, size in self.past(borders):
            found[np.arange(len(borders)), source] += size
        return found


class _Piece:
    """Memory that holds skipping values."""

    def __init__(self, tensor: SavedTensor, may_relay: bool) -> None:
        self.bytes = tensor.bytes
        self._input_of = frozenset(tensor.input_of)
        self._used_by = sorted(self._input_of - (set() if may_relay else set(tensor.passed_by)))
        self._kept_by = tensor.layers

    def next_use(self, start: int) -> float:
        """Return the first layer from ``start`` on that uses it, if a stage from there on gets it; else infinity."""
        return _next(self._used_by, start) if start in self._input_of else np.inf

    def next_keeper(self, start: int) -> float:
        """Return the first layer from ``start`` on whose backward needs it, or infinity."""
        return _next(self._kept_by, start)


def _next(layers: Sequence[int], start: int) -> float:
    place = bisect_left(layers, start)
    return layers[place] if place < len(layers) else np.inf
