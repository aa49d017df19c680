"""Frees the memory of layers that other processes run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ..state.shadow import Layers
from .swapping import rebind, swap_values, without_weak_references


def release(groups: Sequence[Layers], tensors: Collection[Tensor]) -> None:
    """Leave tensors without memory: each stays the same object, with its shape and dtype, on the meta device.

    Gradients of parameters are dropped. A parameter that a graph holds is replaced in the layers by another object.

    Args:
        groups: the layers of all stages.
        tensors: those that no stage of this process uses. Their values are lost.
    """
    if not tensors:
        return
    modules = [part for layers in groups for _, layer in layers for part in layer.modules()]
    replaced: dict[Tensor, Tensor] = {}
    for tensor in tensors:
        if tensor.grad_fn is not None and not tensor._is_view():
            tensor.detach_()
    with without_weak_references(modules):
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                tensor.grad = None
            now = swap_values(tensor, torch.empty_like(tensor.detach(), device="meta"))
            if now is not tensor:
                replaced[tensor] = now
        rebind(modules, replaced)
