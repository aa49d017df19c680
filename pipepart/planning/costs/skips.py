"""Skip connections: values that layers pass to later layers, past the layers between.

::

    stage 0 ──▶ stage 1 ──▶ stage 2 ──▶ stage 3        the stages' outputs
       └─────────────── skip ─────────────▲            made in stage 0, used in stage 3 only

A value goes from each stage that makes or uses it straight to the next stage that uses it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...profiling import Costs
from .stage_memory import Ints


class SkipTransfers(NamedTuple):
    """Transfers of skipping values in cuts, [cuts, skips]: source stage, target stage, bytes (0 if adjacent)."""

    source: Ints
    target: Ints
    bytes: Ints


class Skips:
    """The values of a chain that skip layers, at one micro-batch size. False if there are none.

    Args:
        costs: the costs of the layers.

    Attributes:
        total_bytes: of all skips.
    """

    def __init__(self, costs: Costs) -> None:
        # Layers that make or use a value, with other layers between them.
        gaps = [
            (first, last, value.bytes)
            for value in costs.values
            for first, last in pairwise(value.layers)
            if last > first + 1
        ]
        table = np.array(gaps, dtype=np.int64).reshape(-1, 3)
        self._first, self._last, self._bytes = table[:, :1], table[:, 1:2], table[:, 2]
        self.total_bytes = int(self._bytes.sum())

    def __bool__(self) -> bool:
        return self._bytes.size > 0

    def passing(self, start: int, ends: Ints) -> Ints:
        """Return the bytes that go past the stages with this first layer and these ends: [ends].

        ``ChainCosts.output_bytes`` counts them at both borders.
        """
        return self._bytes @ ((self._first < start) & (self._last >= ends))

    def waiting(self, start: int, ends: Ints) -> Ints:
        """Return an upper bound of the bytes that wait at the stages for each micro-batch in flight there: [ends].

        A value that a stage sends past the next stage waits on its device until the target uses it. The gradient waits
        there for the stage's backward. The value and its gradient never coexist, and both lie within the micro-batch's
        time in flight, so the bytes count once for each micro-batch in flight. The bound is exact if the next stage has
        one layer; a longer stage uses some of the values itself.
        """
        return self._bytes @ ((self._first >= start) & (self._first < ends) & (self._last > ends))

    def transfers(self, borders: Ints) -> SkipTransfers:
        """Return the transfers past stages in cuts, of borders [cuts, borders]."""
        source, target = (
            (borders[:, :, None] <= ends[:, 0]).sum(axis=1) for ends in (self._first, self._last)
        )
        return SkipTransfers(source, target, np.where(target > source + 1, self._bytes, 0))

    def waiting_of(self, borders: Ints) -> Ints:
        """Return the bytes that wait at the stages of cuts for each micro-batch in flight there: [cuts, stages]."""
        skips = self.transfers(borders)
        waiting = np.zeros((len(borders), borders.shape[1] + 1), dtype=np.int64)
        np.add.at(waiting, (np.arange(len(borders))[:, None], skips.source), skips.bytes)
        return waiting
