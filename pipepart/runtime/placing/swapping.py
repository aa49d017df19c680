"""Replaces the memory of a tensor in place: modules and optimizers keep the same tensor object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def swap_values(tensor: Tensor, values: Tensor) -> Tensor:
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


def rebind(modules: Iterable[nn.Module], replaced: Mapping[Tensor, Tensor]) -> None:
    """Bind new tensors where modules have one that could not stay the same object.

    Args:
        replaced: the new tensors, by those that they take the place of.
    """
    for module in modules:
        own = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in own.items():
            if isinstance(value, Tensor) and value in replaced:
                setattr(module, name, replaced[value])


@contextmanager
def without_weak_references(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the weak references of recurrent layers to their parameters, as torch swaps no tensor that has one."""
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()
