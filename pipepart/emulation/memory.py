"""Counts the memory of virtual devices: the device of each storage, and the bytes in use on each device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..autograd.own_copy import tensors
from ..units import format_bytes

PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = _CATEGORIES = ("parameters", "gradients", "optimizer", "other")
_TAG = "_pipepart_tag"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that tensors take on a virtual device.

    Attributes:
        allocated: now.
        peak: the most at any moment since the pipeline was made, or since a trace with ``memory=True`` began.
        by_category: ``allocated`` by category: "parameters" (with buffers), "gradients", "optimizer", and "other":
            activations kept for the backward, messages, temporaries.
    """

    allocated: int
    peak: int
    by_category: Mapping[str, int]


class Tag:
    """Says on which device a storage lives. It is an attribute of the storage and is deleted with it."""

    __slots__ = ("category", "ledger", "size")

    def __init__(self, ledger: Ledger, size: int, category: str) -> None:
        self.ledger, self.size, self.category = ledger, size, category

    def __del__(self) -> None:
        self.ledger.released.append((self.size, self.category))


class Ledger:
    """Counts the bytes on one device. Its worker adds to it; any thread may release storages and read it.

    Args:
        device: its name.
        limit: bytes; None for no limit.

    Attributes:
        released: bytes and category of storages that were freed or assigned to another device. They are subtracted
            later, because a tag may be deleted while this thread holds the lock.
    """

    def __init__(self, device: str, limit: int | None) -> None:
        self.device = device
        self.released: deque[tuple[int, str]] = deque()
        self._limit = limit
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = dict.fromkeys(_CATEGORIES, 0)
        self._peak = 0

    def reset_peak(self) -> None:
        """Begin to look for the peak anew, with the bytes in use now."""
        with self._lock:
            self._peak = self._allocated()

    def enter(self, storage: torch.UntypedStorage, category: str, what: Callable[[], str]) -> None:
        """Assign a storage to this device. ``what`` describes it for the error.

        Raises:
            torch.OutOfMemoryError: the device's limit would be exceeded.
        """
        size = storage.nbytes()
        with self._lock:
            allocated = self._allocated() + size
            if self._limit is not None and allocated > self._limit:
                used = ", ".join(f"{name} {format_bytes(number)}" for name, number in self._bytes.items())
                raise torch.OutOfMemoryError(
                    f"{self.device} is out of memory: {what()} takes {format_bytes(size)}, and "
                    f"{format_bytes(allocated - size)} of its {format_bytes(self._limit)} are in use ({used}). "
                    "Cluster.virtual(..., memory=...) sets the limit"
                )
            self._peak = max(self._peak, allocated)
            self._bytes[category] += size
        setattr(storage, _TAG, Tag(self, size, category))

    def relabel(self, tag: Tag, category: str) -> None:
        """Count a storage under another category."""
        with self._lock:
            self._bytes[tag.category] -= tag.size
            self._bytes[category] += tag.size
            tag.category = category

    def use(self) -> MemoryUse:
        """The bytes in use now and at most so far."""
        with self._lock:
            return MemoryUse(self._allocated(), self._peak, dict(self._bytes))

    def _allocated(self) -> int:
        while self.released:
            size, category = self.released.popleft()
            self._bytes[category] -= size
        return sum(self._bytes.values())


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


def owner_of(tensor: Tensor, layers: Iterable[tuple[str, nn.Module]]) -> str:
    """Describe the parameter, buffer or attribute that shares the tensor's memory; "" if no layer holds it."""
    wanted = {storage._cdata for storage in storages(tensor)}
    for name, layer in layers:
        for path, part in layer.named_modules():
            values = vars(part)
            attributes = {key: values[key] for key in values.keys() - {"_parameters", "_buffers", "_modules"}}
            groups = ("parameter", part._parameters), ("buffer", part._buffers), ("attribute", attributes)
            for kind, group in groups:
                for key, held in group.items():
                    leaves = tensors(held)
                    if wanted.isdisjoint(storage._cdata for leaf in leaves for storage in storages(leaf)):
                        continue
                    where = f"{path}.{key}" if path else key
                    owner = f"{kind} {where!r} of layer {name!r} ({type(layer).__name__})"
                    if kind != "attribute":
                        return owner
                    return (
                        f"{owner}, which does not move with its layer: hold it as a buffer, "
                        f"self.register_buffer({key!r}, ...)"
                    )
    return ""
