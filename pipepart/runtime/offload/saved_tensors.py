"""Moves the tensors that autograd saves in a stage's forwards to the host and back, per micro-batch.

``torch.autograd.graph.save_on_cpu`` copies each tensor by itself, parameters too, while the host waits, and copies it
back when the backward asks for it. Here all tensors of a micro-batch are copied at once, memory that several share
once, beside the computation; they are back before their backward begins. Parameters, buffers and the stage's input stay
where they are: something else keeps them anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...autograd.sparse import dense_parts
from ...autograd.weight_gradients import Saved, unpacked
from .copy_queues import Copy, CopyQueue


class SavedTensors:
    """What autograd saves in one forward: on the device, on the host, or on its way.

    The methods are called in their order.

    Args:
        staying: storages that stay on the device: parameters, buffers and the stage's input.
    """

    def __init__(self, queue: CopyQueue, device: torch.device, staying: frozenset[int]) -> None:
        self._queue = queue
        self._device = device
        self._staying = staying
        self._saved: list[weakref.ref[Saved]] = []  # autograd holds those that it still needs
        self._copy: Copy | None = None
        self._is_on_host = False

    def packing(self) -> AbstractContextManager[object]:
        """Take what autograd saves within the block."""
        return saved_tensors_hooks(self._pack, unpacked)

    def start_out(self, kept: Iterable[Tensor]) -> None:
        """Begin the copy to the host; what shares memory with ``kept`` stays on the device."""
        staying = self._staying | storages_of(kept)
        moved = [
            saved
            for saved in self._alive()
            if staying.isdisjoint(storages_of([saved.tensor])) and self._may_move(saved.tensor)
        ]
        self._saved = list(map(weakref.ref, moved))
        if moved:
            self._copy = self._queue.start_out([saved.tensor for saved in moved])

    def wait(self) -> None:
        """Let what the worker computes from now on wait for the copy that is under way."""
        if self._copy is not None:
            self._queue.wait(self._copy)

    def leave(self) -> None:
        """Free the memory on the device. A tensor that was overwritten since stays: its use raises an error."""
        if self._copy is None:
            return
        left = []
        for reference, on_host in zip(self._saved, self._queue.finish_out(self._copy), strict=True):
            saved = reference()
            if saved is not None and not saved.is_overwritten:
                saved.hold(on_host)
                left.append(reference)
        self._saved, self._copy, self._is_on_host = left, None, True

    def start_back(self) -> None:
        """Begin the copy back to the device."""
        alive = self._alive()
        if self._is_on_host and alive:
            self._saved = list(map(weakref.ref, alive))
            self._copy = self._queue.start_back([saved.tensor for saved in alive])

    def return_(self) -> None:
        """Give autograd the tensors on the device."""
        if self._copy is None:
            return
        for reference, tensor in zip(self._saved, self._copy.tensors, strict=True):
            if (saved := reference()) is not None:
                saved.hold(tensor)
        self._saved, self._copy, self._is_on_host = [], None, False

    def _alive(self) -> list[Saved]:
        return [saved for reference in self._saved if (saved := reference()) is not None]

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor.detach())
        self._saved.append(weakref.ref(saved))
        return saved

    def _may_move(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self._device
            and tensor.numel() > 0
            and not (tensor.is_conj() or tensor.is_neg())
        )


def storages_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return what identifies the memory of tensors."""
    return frozenset(part.untyped_storage()._cdata for tensor in tensors for part in dense_parts(tensor))
