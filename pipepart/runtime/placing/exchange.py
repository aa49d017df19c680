"""Gives a tensor values on another device, for all who hold it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def in_place_of(tensor: Tensor, values: Tensor) -> Tensor:
    """Give a parameter or another tensor new values, which may be on another device.

    The tensor stays the same object, with its attributes and hooks: modules and optimizers that hold it have the new
    values. Torch forbids this if a graph or a weak reference holds the tensor.

    Returns:
        The tensor; or, if that is forbidden, another that must take its place.
    """
    kind, attributes = type(tensor), vars(tensor).copy()
    is_parameter = isinstance(tensor, nn.Parameter)
    made: Tensor = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    gradient, tensor.grad = tensor.grad if is_parameter else None, None
    if gradient is not None:
        made.grad = gradient.to(values.device)
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    try:
        torch.utils.swap_tensors(tensor, made)
        now = tensor
    except RuntimeError:
        tensor.grad = gradient
        now = made
    vars(now).update(attributes)
    if type(now) is not kind:
        now.__class__ = kind  # type: ignore[assignment]
    if is_parameter:  # a swap would not move them
        now._backward_hooks, now._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
    return now
