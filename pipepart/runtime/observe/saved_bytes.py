"""Counts the bytes that the stages of a device actually keep for their backwards during a step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...autograd.own_copy import tensors
from ...autograd.sparse import bytes_of, dense_parts
from ...autograd.weight_gradients import Saved, unpacked

_Piece = int | tuple[int, int]  # a storage, or the part of it that a tensor uses


class KeptBytes:
    """Counts the bytes that autograd and the stages of one device keep; used by the device's worker.

    Storage that several tensors share counts once. Parameters and buffers do not count. If micro-batches are views of
    the mini-batch, each of them counts separately.

    Args:
        mini_batch: the arguments whose views the micro-batches may be.

    Attributes:
        peak: the largest number of bytes after any action.
    """

    def __init__(self, mini_batch: Any) -> None:
        self.peak = 0
        self._split = set(map(_storage, tensors(mini_batch)))
        self._saved: dict[
            _Piece, tuple[int, int]
        ] = {}  # bytes, and the number of times that autograd has saved it
        self._state: set[int] = set()

    def counting(self, modules: Iterable[nn.Module]) -> AbstractContextManager[object]:
        """Count the tensors that autograd saves within the block, until autograd frees them."""
        self._state = {
            _storage(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())
        }
        return saved_tensors_hooks(self._save, unpacked)

    def note(self, others: Iterable[Tensor]) -> None:
        """Update the peak after an action; ``others`` are tensors that the stages keep themselves."""
        kept = {piece: size for piece, (size, _) in self._saved.items()}
        kept.update(filter(None, map(self._piece, others)))
        self.peak = max(self.peak, sum(kept.values()))

    def release(self, piece: _Piece) -> None:
        """Stop counting a tensor that autograd has freed."""
        size, times = self._saved.pop(piece)
        if times > 1:
            self._saved[piece] = size, times - 1

    def _save(self, tensor: Tensor) -> Any:
        found = self._piece(tensor)
        if found is None:
            return tensor
        piece, size = found
        self._saved[piece] = size, self._saved.get(piece, (0, 0))[1] + 1
        return _Counted(self, piece, tensor.detach())

    def _piece(self, tensor: Tensor) -> tuple[_Piece, int] | None:
        storage = _storage(tensor)
        if storage in self._state:
            return None
        parts = dense_parts(tensor)
        if storage in self._split:
            return (storage, parts[-1].data_ptr()), bytes_of(tensor)
        return storage, sum(part.untyped_storage().nbytes() for part in parts)


class _Counted(Saved):
    """A saved tensor that reports when autograd frees it."""

    __slots__ = ("kept", "piece")

    def __init__(self, kept: KeptBytes, piece: _Piece, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.kept, self.piece = kept, piece

    def __del__(self) -> None:
        self.kept.release(self.piece)


def _storage(tensor: Tensor) -> int:
    return dense_parts(tensor)[-1].untyped_storage()._cdata
