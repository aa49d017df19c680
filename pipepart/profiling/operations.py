"""A log of what each layer runs, as one number a layer: equal numbers mean equal operations on equal shapes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.sparse import dense_parts
from ..capture.recorded.python_state.value_key import Same

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
_PLAIN += (torch.memory_format, torch.Size)


class OperationLog:
    """Logs events of layers, such as operations of torch with their arguments.

    Of tensors, shapes, strides and dtypes are logged, of other things the values.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}  # of each different sequence of events
        self._layers: dict[int, int] = {}
        self._index: int | None = None

    def enter(self, index: int | None) -> None:
        """Log what follows for this layer, behind what was logged for it before; for None log nothing."""
        self._index = index

    def add(self, *event: Any) -> None:
        """Log one event."""
        if self._index is None:
            return
        sequence = self._layers.get(self._index, -1), *map(form_of, event)
        self._layers[self._index] = self._numbers.setdefault(sequence, len(self._numbers))

    def of(self, index: int) -> int:
        """Return the number of the events of a layer."""
        return self._layers.get(index, -1)


def form_of(value: Any) -> Hashable:
    """Return a key of a nest that is equal for nests whose tensors differ in their values only."""
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
