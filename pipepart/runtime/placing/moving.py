"""Moves the tensors of a model to the devices of its stages; each stays the object that modules and optimizers hold."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ...capture import state_of
from ..state.shadow import Layers


class Places(NamedTuple):
    """Where the tensors of a model belong.

    Attributes:
        homes: the device of each tensor that a stage of this process uses: that of the first such stage.
        foreign: the tensors that only stages of other processes use, which have no memory here.
    """

    homes: dict[Tensor, torch.device]
    foreign: frozenset[Tensor]

    @classmethod
    def of(cls, groups: Sequence[Layers], devices: Sequence[torch.device], local: Container[int]) -> Self:
        """Find the places of the tensors of all stages, of which this process runs ``local``."""
        homes: dict[Tensor, torch.device] = {}
        others: set[Tensor] = set()
        for number, (layers, device) in enumerate(zip(groups, devices, strict=True)):
            for tensor in (tensor for _, layer in layers for tensor in state_of(layer)):
                if number in local:
                    homes.setdefault(tensor, device)
                else:
                    others.add(tensor)
        return cls(homes, frozenset(others - homes.keys()))


def move(groups: Sequence[Layers], homes: Sequence[torch.device]) -> None:
    """Move each group of layers to its device. Tensors shared by several groups go to the device of the first."""
    for home, layers in zip(reversed(homes), reversed(groups), strict=True):
        there = torch.empty((), device=home)
        for _, module in layers:
            for parameter in module.parameters():
                if torch._has_compatible_shallow_copy_type(parameter, there):  # type: ignore[attr-defined]
                    continue  # as between CPU and CUDA: module.to keeps the object
                if swap_values(parameter, parameter.detach().to(home)) is not parameter:
                    raise RuntimeError(
                        f"a parameter of shape {list(parameter.shape)} cannot be moved to {home}, as a graph or a weak "
                        "reference holds it: make the pipeline before a forward of the model"
                    )
            module.to(home)


def release(groups: Sequence[Layers], tensors: Collection[Tensor]) -> None:
    """Leave tensors that no stage of this process uses as they are, on the meta device without values and gradients.

    One that a graph of the caller's holds keeps its memory.
    """
    with without_weak_references(
        part for layers in groups for _, layer in layers for part in layer.modules()
    ):
        for tensor in tensors:
            if tensor.grad_fn is not None and not tensor._is_view():
                tensor.detach_()
            if isinstance(tensor, nn.Parameter):
                tensor.grad = None
            swap_values(tensor, torch.empty_like(tensor.detach(), device="meta"))


def swap_values(tensor: Tensor, values: Tensor) -> Tensor:
    """Give a parameter or another tensor new values, which may be on another device; return it.

    The tensor stays the same object, with its attributes and hooks: modules and optimizers that hold it have the new
    values. Torch forbids this if a graph or a weak reference holds the tensor. Then another one that has the values is
    returned.
    """
    kind, attributes = type(tensor), vars(tensor).copy()
    is_parameter = isinstance(tensor, nn.Parameter)
    replacement: Tensor = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    gradient, tensor.grad = tensor.grad if is_parameter else None, None
    if gradient is not None:
        replacement.grad = gradient.to(values.device)
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    try:
        torch.utils.swap_tensors(tensor, replacement)
    except RuntimeError:
        tensor.grad = gradient
        return replacement
    vars(tensor).update(attributes)
    if type(tensor) is not kind:
        tensor.__class__ = kind  # type: ignore[assignment]
    if is_parameter:  # a swap would not move them
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
    return tensor


@contextmanager
def without_weak_references(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let recurrent layers have no weak references to their parameters within the block, which torch does not swap."""
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    try:
        for module in recurrent:
            module._flat_weight_refs = []
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()
