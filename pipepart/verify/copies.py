"""Copies of a model and its loss that a check trains, in the precision that it asks for."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import flatten
from ..capture.deep_copies import deep_copies


def copy_of(model: nn.Module, loss_fn: Any, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    """Both, sharing what they share, with floating point numbers of ``dtype``; None leaves each its own.

    Raises:
        TypeError: a layer or the loss cannot be copied.
    """
    try:
        twin, loss = deep_copies(model, loss_fn)
    except Exception as error:
        raise TypeError(
            f"a check trains copies, and {_uncopied(model)} cannot be copied: copy.deepcopy raises "
            f"{type(error).__name__}: {error}. Give it a __deepcopy__, or keep what cannot be copied outside of it"
        ) from error
    if dtype is not None:
        seen: dict[Tensor, Tensor] = {}
        for module in (twin, *([loss] if isinstance(loss, nn.Module) else [])):
            _cast(module, dtype, seen)
        loss = _cast_bound(loss, dtype)
    return twin, loss


def cast(nest: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    """A copy of a nest of tensors on a device, with floating point numbers of ``dtype``."""

    def one(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device, wanted, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, one, nest)


def own_dtype(model: nn.Module, sample: Any) -> str:
    """The floating point dtypes of a model's state, or of its sample where it has none, in a word."""
    state = [*model.parameters(), *model.buffers()]
    found = _floating(state) or _floating(pytree.tree_leaves(sample))
    return ", ".join(found) or "own"


def _floating(items: list[Any]) -> list[str]:
    tensors = [item for item in items if isinstance(item, Tensor) and item.is_floating_point()]
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def _cast(module: nn.Module, dtype: torch.dtype, seen: dict[Tensor, Tensor]) -> None:
    """In place; a parameter or buffer under two names stays one."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = seen.setdefault(buffer, buffer.to(dtype))


def _cast_bound(loss_fn: Any, dtype: torch.dtype) -> Any:
    """A loss with the tensors bound to it by ``functools.partial``, such as class weights, cast."""
    if not isinstance(loss_fn, functools.partial):
        return loss_fn
    args, keywords = pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (loss_fn.args, loss_fn.keywords)
    )
    return functools.partial(_cast_bound(loss_fn.func, dtype), *args, **keywords)


def _uncopied(model: nn.Module) -> str:
    for name, layer in flatten(model):
        try:
            copy.deepcopy(layer)
        except Exception:
            return f"layer {name!r} ({type(layer).__name__})"
    return "the model with its loss"
