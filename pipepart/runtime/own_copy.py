"""A copy of a message for layers that write into their input, where somebody still needs the message as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors(message: Any) -> Sequence[Tensor]:
    """All tensors of a message."""
    if type(message) is Tensor:
        return (message,)
    return [leaf for leaf in pytree.tree_leaves(message) if isinstance(leaf, Tensor)]


def own_copy(message: Any) -> Any:
    """The message in memory of its own, each tensor in the layout that it has; those that share memory still do."""
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors(message):
        if tensor.layout is torch.strided:
            groups.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    copies = {id(old): new for group in groups.values() for old, new in _copies(group)}

    def copy(tensor: Tensor) -> Tensor:
        new = copies[id(tensor)] if id(tensor) in copies else tensor.detach().clone()
        return new.requires_grad_(tensor.requires_grad)

    return copy(message) if type(message) is Tensor else pytree.tree_map_only(Tensor, copy, message)


@torch.no_grad()
def _copies(group: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Copies of tensors in one storage: the stretch of it that they lie in is copied, and each laid over it again."""
    filled = [tensor for tensor in group if tensor.numel()]
    if len(filled) < 2 and all(tensor.is_contiguous() for tensor in filled):
        return [(tensor, tensor.detach().clone()) for tensor in group]
    first = min(tensor.storage_offset() for tensor in filled)
    last = max(_last(tensor) for tensor in filled)
    stretch = filled[0].detach().as_strided((last - first + 1,), (1,), first).clone()
    found = []
    for tensor in group:
        place = tensor.storage_offset() - first if tensor.numel() else 0
        # Detached from the stretch it is no view, which could not be written where something is differentiated.
        found.append((tensor, stretch.as_strided(tensor.shape, tensor.stride(), place).detach()))
    return found


def _last(tensor: Tensor) -> int:
    """The place in its storage of the last element of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps))
