"""Logs the operations of each layer as one number; equal numbers mean equal operations on equal shapes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.sparse import dense_parts
from ..capture.recorded.python_state.values import Same

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
_PLAIN += (torch.memory_format, torch.Size)


class OperationLog:
    """Logs the events of each layer, such as torch operations with their arguments.

    Tensors are logged by shape, strides and dtype, all other arguments by value.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}  # a number for each distinct sequence of events
        self._layers: dict[int, int] = {}
        self._index: int | None = None

    def enter(self, index: int | None) -> None:
        """Append the following events to the log of layer ``index``; None to log nothing."""
        self._index = index

    def add(self, *event: Any) -> None:
        """Append an event to the log of the current layer."""
        if self._index is None:
            return
        sequence = self._layers.get(self._index, -1), *map(form_of, event)
        self._layers[self._index] = self._numbers.setdefault(sequence, len(self._numbers))

    def of(self, index: int) -> int:
        """Return the number of a layer's sequence of events; -1 if it has none."""
        return self._layers.get(index, -1)


def form_of(value: Any) -> Hashable:
    """Return a key of a nest. Keys are equal for nests that differ only in the values of their tensors."""
    if isinstance(value, Tensor):
        parts = [(*part.shape, *part.stride()) for part in dense_parts(value) if part.layout is torch.strided]
        extents = [extent if type(extent) is int else str(extent) for extent in value.shape]
        return type(value), *extents, *parts, value.dtype, value.device, value.layout, value.requires_grad
    if isinstance(value, _PLAIN):
        return type(value), value
    leaves = pytree.tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return Same(value)
    return type(value), *map(form_of, leaves)
