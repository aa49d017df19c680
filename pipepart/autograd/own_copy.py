"""Copies a nest of tensors; tensors that share memory also share it in the copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Copy = Callable[[Tensor], Tensor]  # of a detached tensor
_ALIGNMENT = 64  # bytes, of memory that torch allocates on the CPU


def tensors(message: Any) -> Sequence[Tensor]:
    """Return all tensors of a message."""
    if type(message) is Tensor:
        return (message,)
    return [leaf for leaf in pytree.tree_leaves(message) if isinstance(leaf, Tensor)]


def leaves_of(nest: Any) -> Sequence[Any]:
    """Return the leaves of a nest: tensors and other values."""
    return (nest,) if type(nest) is Tensor else pytree.tree_leaves(nest)


def own_copy(message: Any, copy: Copy = Tensor.clone) -> Any:
    """Copy a message. Each tensor keeps its layout and whether it requires a gradient; it has no graph.

    Args:
        message: a tensor, or any nest of tensors.
        copy: makes each copy, on another device for example.
    """
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors(message):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            # A storage on the meta device has no address.
            groups.setdefault((storage.data_ptr() or storage._cdata, tensor.dtype), []).append(tensor)
    copies = {id(old): new for group in groups.values() for old, new in _copies(group, copy)}

    def copied(tensor: Tensor) -> Tensor:
        new = copies[id(tensor)] if id(tensor) in copies else copy(tensor.detach())
        return new.requires_grad_(tensor.requires_grad)

    return copied(message) if type(message) is Tensor else pytree.tree_map_only(Tensor, copied, message)


@torch.no_grad()
def _copies(group: Sequence[Tensor], copy: Copy) -> list[tuple[Tensor, Tensor]]:
    """Copy tensors of one storage: copy the range that holds them all, and make a view of it for each tensor.

    The range starts at a multiple of 64 bytes, so that each copy is aligned as its original: vectorized kernels of
    the CPU round differently at other alignments.
    """
    filled = [tensor for tensor in group if tensor.numel()]
    if not filled:
        return [(tensor, copy(tensor.detach())) for tensor in group]
    first = min(tensor.storage_offset() for tensor in filled)
    lead = first % max(_ALIGNMENT // filled[0].element_size(), 1)
    if len(filled) == 1 and filled[0].is_contiguous() and not lead:
        return [(tensor, copy(tensor.detach())) for tensor in group]
    first -= lead
    end = max(_end(tensor) for tensor in filled)
    stretch = copy(filled[0].detach().as_strided((end - first,), (1,), first))
    copies = []
    for tensor in group:
        place = tensor.storage_offset() - first if tensor.numel() else 0
        # Detached, so that it is not a view: autograd refuses some writes into views.
        copies.append((tensor, stretch.as_strided(tensor.shape, tensor.stride(), place).detach()))
    return copies


def _end(tensor: Tensor) -> int:
    """Return the storage index after the last element of a non-empty tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)) + 1
