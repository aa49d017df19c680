"""Bytes of skip connections in stages: values that pass a stage, that it keeps, and that wait on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...profiling import Costs, SavedTensor
from .stage_memory import Ints


class Gap(NamedTuple):
    """Layers ``first`` and ``last`` make or use a value, and none between does."""

    first: int
    last: int
    bytes: int


class SkipTransfers(NamedTuple):
    """Transfers of skipping values in cuts, [cuts, skips]: source stage, target stage, bytes (0 if adjacent)."""

    source: Ints
    target: Ints
    bytes: Ints


class Skips:
    """The skipping values of a chain at one micro-batch size. False if there are none.

    The methods take the first layer of stages and their ends, and return one number for each end.

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
            for value in costs.values
            for first, last in pairwise(value.layers)
            if last > first + 1
        ]
        table = np.array(self.gaps, dtype=np.int64).reshape(-1, 3)
        self._first, self._last, self._bytes = table[:, :1], table[:, 1:2], table[:, 2]
        self.may_relay = may_relay
        pieces, layers = [tensor for tensor in costs.saved if tensor.passed_by], len(costs.layers)
        self._piece_bytes = np.array([piece.bytes for piece in pieces], dtype=np.int64)
        # [pieces, layers]: the first layer from each on that uses what it gets, and that keeps the memory.
        uses = [_next_use(piece, layers, may_relay) for piece in pieces]
        keepers = [_next(piece.layers, layers) for piece in pieces]
        self._next_use, self._next_keeper = (np.array(rows).reshape(-1, layers) for rows in (uses, keepers))

    def __bool__(self) -> bool:
        return bool(self.gaps) or self._piece_bytes.size > 0

    def passing(self, start: int, ends: Ints) -> Ints:
        """Return the bytes that go past the stages. ``ChainCosts.output_bytes`` counts them at both borders."""
        if self.may_relay:
            return np.zeros_like(ends)
        return self._bytes @ ((self._first < start) & (self._last >= ends))

    def kept(self, start: int, ends: Ints) -> tuple[Ints, Ints]:
        """Return the stash and boundary bytes of memory that values skip in.

        A stage keeps a value that it uses and gets from an earlier stage.
        """
        used = self._next_use[:, start, None] < ends
        kept = self._next_keeper[:, start, None] < ends
        return self._piece_bytes @ (used | kept), self._piece_bytes @ used

    def waiting(self, start: int, ends: Ints) -> Ints:
        """Return the bytes that wait on the stages for each micro-batch in flight there, if the next has one layer.

        A value that a stage sends past the next one waits on its device until the target uses it. The gradient waits
        there for the stage's backward. The value and its gradient never coexist, and both lie within the micro-batch's
        time in flight, so the bytes count once for each micro-batch in flight. It is an upper bound: a longer next
        stage uses some of the values itself.
        """
        return self._bytes @ ((self._first >= start) & (self._first < ends) & (self._last > ends))

    def transfers(self, borders: Ints) -> SkipTransfers:
        """Return the values of cuts, [cuts, borders], that may go past stages: [cuts, gaps]."""
        source, target = (
            (borders[:, :, None] <= ends[:, 0]).sum(axis=1) for ends in (self._first, self._last)
        )
        return SkipTransfers(source, target, np.where(target > source + 1, self._bytes, 0))

    def waiting_of(self, borders: Ints) -> Ints:
        """[cuts, stages]: the bytes of :meth:`waiting` for given cuts, where no stage relays."""
        skips = self.transfers(borders)
        found = np.zeros((len(borders), borders.shape[1] + 1), dtype=np.int64)
        np.add.at(found, (np.arange(len(borders))[:, None], skips.source), skips.bytes)
        return found


def _next_use(piece: SavedTensor, layers: int, may_relay: bool) -> Ints:
    """Return, for each layer, the next one that uses memory that it is an input of; ``layers`` if there is none."""
    unused = () if may_relay else piece.passed_by
    found = _next([layer for layer in piece.input_of if layer not in unused], layers)
    is_input = np.zeros(layers, dtype=bool)
    is_input[list(piece.input_of)] = True
    return np.where(is_input, found, layers)


def _next(some: Sequence[int], layers: int) -> Ints:
    """Return, for each layer, itself or the next one that is among some; ``layers`` if there is none."""
    return np.append(np.array(some, dtype=np.int64), layers)[np.searchsorted(some, np.arange(layers))]
