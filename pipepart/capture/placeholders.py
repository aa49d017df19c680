"""Copies tensors to a device. Copies of meta tensors get small random values."""

from __future__ import annotations

import torch
from torch import Tensor


def copied(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Copy a tensor to a device, without gradients.

    One on the meta device has no values. Its copy on another device gets small random numbers if torch draws numbers of
    its dtype, zeros otherwise.

    Args:
        tensor: the tensor.
        device: where to; None for where it is.
    """
    device = tensor.device if device is None else device
    if not tensor.is_meta or device.type == "meta":
        return tensor.detach().to(device, copy=True)
    copy = torch.empty_like(tensor, device=device, requires_grad=False)
    if tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
        # As layers start: their outputs neither overflow nor vanish.
        return copy.normal_(std=(tensor.shape[-1] if tensor.dim() else 1) ** -0.5)
    return copy.zero_()
