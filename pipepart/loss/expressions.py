"""Numbers the expressions of a loss, to see whether micro-batches compute alike."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from .buffers import original_of
from .terms import Predict


class Expressions:
    """Numbers for the expressions of a loss, kept for a step: equal numbers, equal computations in micro-batches."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._held: dict[int, Tensor] = {}
        self.replays: dict[Hashable, Predict] = {}

    def number(self, key: Hashable) -> int:
        """The number of an expression."""
        return self._numbers.setdefault(key, len(self._numbers))

    def outside(self, tensor: Tensor) -> Hashable:
        """What names a constant, or the buffer that it copies; it is held, so that no other gets its identity."""
        tensor = original_of(tensor)
        self._held[id(tensor)] = tensor
        return "outside", id(tensor), tensor._version
