"""Shards and whole values of DTensors; other tensors are their own shard and whole.

``torch.distributed.tensor`` is not imported for tensors that are none: that takes a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Any) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the shard of this process, which shares memory with the tensor."""
    any_tensor: Any = tensor
    return any_tensor._local_tensor if is_dtensor(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole value. Of a DTensor all processes of its mesh call this."""
    any_tensor: Any = tensor
    return any_tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_leaf(tensor: Tensor) -> Tensor:
    """Return the shard of a parameter with the shard of its gradient, which share memory with them."""
    if not is_dtensor(tensor):
        return tensor
    leaf = local(tensor).detach()
    leaf.grad = None if tensor.grad is None else local(tensor.grad)
    return leaf


def sharded_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return a whole value as a DTensor that is laid out as another one. Nothing is sent.

    Args:
        value: the same on all processes; a DTensor is returned unchanged, and so is any value for a plain tensor.
        tensor: gives the mesh and the placements.
    """
    if not is_dtensor(tensor) or is_dtensor(value):
        return value
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    wanted: Any = tensor
    mesh, placements = wanted.device_mesh, wanted.placements
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    shard = value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    copied = torch.empty(shard.shape, dtype=value.dtype, device=local(tensor).device).copy_(shard)
    return DTensor.from_local(
        copied, mesh, placements, run_check=False, shape=wanted.shape, stride=wanted.stride()
    )


def shard_place(tensor: Tensor) -> tuple[int, ...]:
    """Return where this process's shard is in a DTensor: equal for processes with the same shard; () for others."""
    if not is_dtensor(tensor):
        return ()
    any_tensor: Any = tensor
    places = any_tensor.device_mesh.get_coordinate()
    return tuple(
        0 if placement.is_replicate() else place
        for place, placement in zip(places, any_tensor.placements, strict=True)
    )


def mesh_names(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the dimensions of a DTensor's mesh; () for other tensors."""
    any_tensor: Any = tensor
    return tuple(any_tensor.device_mesh.mesh_dim_names or ()) if is_dtensor(tensor) else ()
