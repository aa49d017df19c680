"""Counts what the stages of a device keep for their backwards while a step runs: real bytes, not those of the plan."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ...autograd.saved_tensor import Saved, unpacked
from ...autograd.sparse import bytes_of, dense_parts

_Piece = int | tuple[int, int]  # a storage, or the part of one that a tensor has


class KeptBytes:
    """What autograd and the stages of one device keep, in bytes; used by its worker.

    Storage that several tensors share counts once, that of parameters and buffers not at all. Of a mini-batch that is
    split into views, each micro-batch counts by itself.

    Args:
        mini_batch: what micro-batches may be views of.

    Attributes:
        peak: the most, after any action.
        peak_place: of the action that reached it, in the order of the device.
    """

    def __init__(self, mini_batch: Any) -> None:
        self.peak = 0
        self.peak_place = 0
        self._split = {_storage(leaf) for leaf in pytree.tree_leaves(mini_batch) if isinstance(leaf, Tensor)}
        self._saved: dict[_Piece, tuple[int, int]] = {}  # bytes, and how often autograd has saved it
        self._state: set[int] = set()
        self._noted = -1

    def counting(self, modules: Iterable[nn.Module]) -> AbstractContextManager[object]:
        """Around what an action of a stage computes: what autograd saves in it counts for as long as it holds it."""
        self._state = {
            _storage(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())
        }
        return saved_tensors_hooks(self._save, unpacked)

    def note(self, others: Iterable[Tensor]) -> None:
        """Behind an action, with what its device's stages keep beside autograd."""
        self._noted += 1
        kept = {piece: size for piece, (size, _) in self._saved.items()}
        kept.update(filter(None, map(self._piece, others)))
        now = sum(kept.values())
        if now > self.peak:
            self.peak, self.peak_place = now, self._noted

    def release(self, piece: _Piece) -> None:
        """Autograd has let go of it."""
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
    """Tells when it goes."""

    __slots__ = ("kept", "piece")

    def __init__(self, kept: KeptBytes, piece: _Piece, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.kept, self.piece = kept, piece

    def __del__(self) -> None:
        self.kept.release(self.piece)


def _storage(tensor: Tensor) -> int:
    return dense_parts(tensor)[-1].untyped_storage()._cdata
