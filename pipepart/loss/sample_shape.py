"""The shape of a tensor with samples as seen by a loss function; it reports reads of the number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any


class Shape(tuple[int, ...]):
    """The shape of a tensor with samples. Calls ``leak`` if the loss may have read the number of samples from it."""

    dim: int
    leak: Callable[[], None]
    compared: Callable[[], None]

    def __getitem__(self, index: Any) -> Any:
        if self.dim in (range(len(self))[index] if isinstance(index, slice) else [range(len(self))[index]]):
            self.leak()
        return tuple(self)[index] if isinstance(index, slice) else super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        self.leak()
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            self.compared()
        return super().__eq__(other)

    __hash__ = tuple.__hash__

    def numel(self) -> int:
        """Return the number of elements, samples included."""
        return prod(self)
