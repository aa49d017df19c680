"""Bytes of skip connections in stages: values that go past a stage, values it keeps, and values that wait there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...profiling import Costs, SavedTensor
from .stage_memory import Ints


class Gap(NamedTuple):
    """A value that layers ``first`` and ``last`` make or use, but no layer between them."""

    first: int
    last: int
    bytes: int


class SkipTransfers(NamedTuple):
    """Transfers of skipping values in cuts, [cuts, skips]: source stage, target stage, bytes (0 if adjacent)."""

    source: Ints
    target: Ints
    bytes: Ints


class Skips:
    """The values of a chain that skip layers, at one micro-batch size. False if there are none.

    The methods take the first layer of stages and their ends, and return bytes for each end: [ends].

    Args:
        costs: the costs of the layers.
        may_relay: links differ, so stages may relay values that they do not use. No value is then assumed to go past a
            stage, which gives upper bounds of seconds and bytes.

    Attributes:
        gaps: the skips between layers that are not neighbours.
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
        # [pieces, layers]: the first layer, from each layer on, that has the piece as input, or that keeps its memory.
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
        """Return the stash bytes and boundary bytes of skipping values: each [ends].

        A stage keeps each value that it uses and receives from an earlier stage.
        """
        used = self._next_use[:, start, None] < ends
        saved = self._next_keeper[:, start, None] < ends
        return self._piece_bytes @ (used | saved), self._piece_bytes @ used

    def waiting(self, start: int, ends: Ints) -> Ints:
        """Return an upper bound of the bytes that wait at the stages for each micro-batch in flight there.

        A value that a stage sends past the next stage waits on its device until the target uses it. The gradient waits
        there for the stage's backward. The value and its gradient never coexist, and both lie within the micro-batch's
        time in flight, so the bytes count once for each micro-batch in flight. The bound is exact if the next stage has
        one layer; a longer stage uses some of the values itself.
        """
        return self._bytes @ ((self._first >= start) & (self._first < ends) & (self._last > ends))

    def transfers(self, borders: Ints) -> SkipTransfers:
        """Return the transfers of cuts that may go past stages, [cuts, gaps], of borders [cuts, borders]."""
        source, target = (
            (borders[:, :, None] <= ends[:, 0]).sum(axis=1) for ends in (self._first, self._last)
        )
        return SkipTransfers(source, target, np.where(target > source + 1, self._bytes, 0))

    def waiting_of(self, borders: Ints) -> Ints:
        """Return the bytes of :meth:`waiting` for the stages of cuts, if no stage relays: [cuts, stages]."""
        skips = self.transfers(borders)
        waiting = np.zeros((len(borders), borders.shape[1] + 1), dtype=np.int64)
        np.add.at(waiting, (np.arange(len(borders))[:, None], skips.source), skips.bytes)
        return waiting


def _next_use(piece: SavedTensor, layers: int, may_relay: bool) -> Ints:
    """Return, for each layer with this input, itself or the next layer that uses it; ``layers`` if there is none."""
    unused = () if may_relay else piece.passed_by
    users = _next([layer for layer in piece.input_of if layer not in unused], layers)
    is_input = np.zeros(layers, dtype=bool)
    is_input[list(piece.input_of)] = True
    return np.where(is_input, users, layers)


def _next(chosen: Sequence[int], layers: int) -> Ints:
    """Return, for each layer, the first of the chosen layers from it on; ``layers`` if there is none."""
    return np.append(np.array(chosen, dtype=np.int64), layers)[np.searchsorted(chosen, np.arange(layers))]
