"""Counts the bytes of allocated tensors, and their peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..autograd.dispatch_mode import DispatchMode
from ..autograd.sparse import dense_tensors


class Allocations(DispatchMode):
    """Counts the bytes of each storage from its allocation by a torch operation until it is freed.

    Memory that a kernel allocates internally is not counted.

    Attributes:
        allocated: bytes allocated now.
        peak: largest value of ``allocated`` since the last :meth:`mark`.
        start: value of ``allocated`` at the last :meth:`mark`.
        ignored: addresses of storages that do not count.
    """

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.allocated = self.peak = self.start = 0
        self.ignored = ignored

    def mark(self) -> None:
        """Set ``start`` and ``peak`` to the bytes allocated now."""
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
    """An attribute of a storage that counts its bytes until the storage is freed."""

    __slots__ = ("counter", "size")

    def __init__(self, counter: Allocations, size: int) -> None:
        self.counter, self.size = counter, size
        counter.allocated += size
        counter.peak = max(counter.peak, counter.allocated)

    def __del__(self) -> None:
        self.counter.allocated -= self.size
