"""The memory account of one virtual device: which storages live on it, and how many bytes they take."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...units import format_bytes

PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = _CATEGORIES = ("parameters", "gradients", "optimizer", "other")
_TAG = "_pipepart_tag"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that tensors take on a virtual device.

    Attributes:
        allocated: now.
        peak: the most at any moment since the pipeline was made.
        by_category: ``allocated`` by category: "parameters" (with buffers), "gradients", "optimizer", and "other":
            activations kept for the backward, messages, temporaries.
        peak_by_category: the most of each category. The moments differ, so the sum may exceed ``peak``.
    """

    allocated: int
    peak: int
    by_category: Mapping[str, int]
    peak_by_category: Mapping[str, int]


class Tag:
    """Says on which device a storage lives. It is an attribute of the storage and is deleted with it."""

    __slots__ = ("category", "ledger", "size")

    def __init__(self, ledger: Ledger, size: int, category: str) -> None:
        self.ledger, self.size, self.category = ledger, size, category

    def __del__(self) -> None:
        self.ledger.released(self)


class Ledger:
    """Counts the bytes on one device. Its worker adds to it; any thread may release storages and read it.

    Args:
        device: its name.
        limit: bytes; None for no limit.
    """

    def __init__(self, device: str, limit: int | None) -> None:
        self.device = device
        self._limit = limit
        self._lock = threading.Lock()
        # Tags may be deleted while this thread holds the lock, so `released` must not take it.
        self._released: deque[tuple[int, str]] = deque()
        self._bytes: dict[str, int] = dict.fromkeys(_CATEGORIES, 0)
        self._peaks = dict(self._bytes)
        self._allocated = self._peak = 0

    def enter(self, storage: torch.UntypedStorage, category: str, what: Callable[[], str]) -> None:
        """Assign a storage to this device. ``what`` describes it for the error.

        Raises:
            torch.OutOfMemoryError: the device's limit would be exceeded.
        """
        size = storage.nbytes()
        with self._lock:
            self._subtract_released()
            if self._limit is not None and self._allocated + size > self._limit:
                raise torch.OutOfMemoryError(self._full(self._limit, size, what()))
            self._allocated += size
            self._peak = max(self._peak, self._allocated)
            self._add(category, size)
        setattr(storage, _TAG, Tag(self, size, category))

    def relabel(self, tag: Tag, category: str) -> None:
        """Count a storage under another category."""
        with self._lock:
            self._bytes[tag.category] -= tag.size
            self._add(category, tag.size)
            tag.category = category

    def released(self, tag: Tag) -> None:
        """Note that a storage was freed or assigned to another device."""
        self._released.append((tag.size, tag.category))

    def use(self) -> MemoryUse:
        """The bytes in use now and at most so far."""
        with self._lock:
            self._subtract_released()
            return MemoryUse(self._allocated, self._peak, dict(self._bytes), dict(self._peaks))

    def _add(self, category: str, size: int) -> None:
        self._bytes[category] += size
        self._peaks[category] = max(self._peaks[category], self._bytes[category])

    def _subtract_released(self) -> None:
        while self._released:
            size, category = self._released.popleft()
            self._bytes[category] -= size
            self._allocated -= size

    def _full(self, limit: int, size: int, what: str) -> str:
        used = ", ".join(f"{category} {format_bytes(number)}" for category, number in self._bytes.items())
        return (
            f"{self.device} is out of memory: {what} takes {format_bytes(size)}, and {format_bytes(self._allocated)} "
            f"of its {format_bytes(limit)} are in use ({used}). Cluster.virtual(..., memory=...) sets the limit"
        )


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The CPU storages that hold a tensor's values; none for meta and nested tensors."""
    if tensor.layout is torch.strided:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # nested tensors and other wrappers
            return
        if tag_of(storage) is not None or storage.device.type == "cpu":  # the tag is faster to read
            yield storage
    elif tensor.layout is torch.sparse_coo:
        yield from storages(tensor._indices())
        yield from storages(tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        yield from storages(tensor.values())


def tag_of(storage: torch.UntypedStorage) -> Tag | None:
    """The storage's tag; None for a storage that lives on no virtual device, in host memory."""
    return getattr(storage, _TAG, None)
