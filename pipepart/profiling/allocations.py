"""Counts the bytes of tensors that are allocated, and their peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..autograd.dispatch_mode import DispatchMode
from ..autograd.sparse import dense_tensors


class Allocations(DispatchMode):
    """Counts the bytes of each storage that an operation of torch allocates, until it is freed.

    Memory that a kernel allocates for itself is not seen.

    Attributes:
        allocated: bytes at present.
        peak: the most bytes at any moment since :meth:`mark`.
        start: bytes at the last :meth:`mark`.
        ignored: addresses of storages that do not count.
    """

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.allocated = self.peak = self.start = 0
        self.ignored = ignored

    def mark(self) -> None:
        """Begin to look for the peak."""
        self.start = self.peak = self.allocated

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in dense_tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata in self.ignored or hasattr(storage, "_pipepart_token"):
                continue
            if all(storage._cdata != used.untyped_storage()._cdata for used in dense_tensors((args, kwargs))):
                storage._pipepart_token = _Token(self, storage.nbytes())  # type: ignore[attr-defined]
        return result


class _Token:
    """Counts the bytes of a storage as long as the storage has it as an attribute."""

    __slots__ = ("counter", "size")

    def __init__(self, counter: Allocations, size: int) -> None:
        self.counter, self.size = counter, size
        counter.allocated += size
        counter.peak = max(counter.peak, counter.allocated)

    def __del__(self) -> None:
        self.counter.allocated -= self.size
