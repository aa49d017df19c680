"""The memory of one virtual device: which storages live on it, and how many bytes they take."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...units import format_bytes

PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = "parameters", "gradients", "optimizer", "other"
_CATEGORIES = PARAMETERS, GRADIENTS, OPTIMIZER, OTHER
_MARK = "_pipepart_mark"


@dataclass(frozen=True)
class MemoryUse:
    """The bytes that tensors take on a device.

    Attributes:
        allocated: now.
        peak: the most at any moment since the pipeline was made.
        by_category: of ``allocated``: "parameters" (and buffers), "gradients", "optimizer", and "other", which is what
            stages keep for their backwards, messages, and what an operation has made and nobody has let go of.
        peak_by_category: the most of each, at moments of their own, so that they may sum up to more than ``peak``.
    """

    allocated: int
    peak: int
    by_category: Mapping[str, int]
    peak_by_category: Mapping[str, int]


class Mark:
    """What says that a storage lives on a device. It is an attribute of the storage and dies with it."""

    __slots__ = ("category", "ledger", "size")

    def __init__(self, ledger: Ledger, size: int, category: str) -> None:
        self.ledger, self.size, self.category = ledger, size, category

    def __del__(self) -> None:
        self.ledger.died(self)


class Ledger:
    """The account of one device. Its worker adds to it; storages may die, and the account be read, on any thread.

    Args:
        device: its name.
        limit: bytes; None for no limit.
    """

    def __init__(self, device: str, limit: int | None) -> None:
        self.device = device
        self._limit = limit
        self._lock = threading.Lock()
        self._dead: deque[tuple[int, str]] = deque()  # a death may come while the lock is held: it takes none
        self._bytes: dict[str, int] = dict.fromkeys(_CATEGORIES, 0)
        self._allocated = 0
        self._peak = 0
        self._peaks = dict(self._bytes)

    def enter(self, storage: torch.UntypedStorage, category: str, what: Callable[[], str]) -> None:
        """Takes a storage in, wherever it was before; ``what`` it is, is asked where there is no room.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        size = storage.nbytes()
        with self._lock:
            self._bury()
            if self._limit is not None and self._allocated + size > self._limit:
                raise torch.OutOfMemoryError(self._full(size, what()))
            self._allocated += size
            self._count(category, size)
            self._peak = max(self._peak, self._allocated)
        setattr(storage, _MARK, Mark(self, size, category))

    def call(self, mark: Mark, category: str) -> None:
        """Counts a storage under another category."""
        with self._lock:
            self._bytes[mark.category] -= mark.size
            self._count(category, mark.size)
            mark.category = category

    def died(self, mark: Mark) -> None:
        """Is told that a storage is no more."""
        self._dead.append((mark.size, mark.category))

    def use(self) -> MemoryUse:
        """The account as it stands."""
        with self._lock:
            self._bury()
            return MemoryUse(self._allocated, self._peak, dict(self._bytes), dict(self._peaks))

    def _count(self, category: str, size: int) -> None:
        self._bytes[category] += size
        self._peaks[category] = max(self._peaks[category], self._bytes[category])

    def _bury(self) -> None:
        while self._dead:
            size, category = self._dead.popleft()
            self._bytes[category] -= size
            self._allocated -= size

    def _full(self, size: int, what: str) -> str:
        used = ", ".join(f"{category} {format_bytes(number)}" for category, number in self._bytes.items())
        assert self._limit is not None
        return (
            f"{self.device} is out of memory: {what} takes {format_bytes(size)}, and {format_bytes(self._allocated)} "
            f"of its {format_bytes(self._limit)} are in use ({used}); Cluster.virtual(..., memory=...) grants it more"
        )


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Those that hold a tensor's numbers; none where these are elsewhere than in the CPU's memory."""
    if tensor.layout is torch.strided:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # nested tensors, and the like
            return
        if mark_of(storage) is not None or storage.device.type == "cpu":  # a mark is the quicker to see
            yield storage
    elif tensor.layout is torch.sparse_coo:
        yield from storages(tensor._indices())
        yield from storages(tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        yield from storages(tensor.values())


def mark_of(storage: torch.UntypedStorage) -> Mark | None:
    """The mark on a storage; None for one of the host."""
    return getattr(storage, _MARK, None)
