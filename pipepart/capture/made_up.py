"""Copies tensors to devices; makes up values for those of the meta device, and tells which values are made up."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd.sparse import dense_parts


def copied(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Copy a tensor to a device, without asking for gradients.

    One on the meta device has no values. Its copy on another device gets small random numbers if torch draws numbers of
    its dtype, zeros otherwise, and is marked as made up.

    Args:
        tensor: the tensor.
        device: where to; None for where it is.
    """
    device = tensor.device if device is None else device
    if not tensor.is_meta or device.type == "meta":
        return tensor.detach().to(device, copy=True)
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    mark_made_up(made)
    if tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
        # As layers start: their outputs neither overflow nor vanish.
        return made.normal_(std=(tensor.shape[-1] if tensor.dim() else 1) ** -0.5)
    return made.zero_()


def mark_made_up(tensor: Tensor) -> None:
    """Mark the memory of a tensor: its values come from made up ones."""
    for part in dense_parts(tensor):
        part.untyped_storage()._pipepart_made_up = True  # type: ignore[attr-defined]


def is_made_up(tensor: Tensor) -> bool:
    """Return True if the memory of a tensor is marked."""
    return any(hasattr(part.untyped_storage(), "_pipepart_made_up") for part in dense_parts(tensor))
