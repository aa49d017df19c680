"""Copies a model and its loss for one training of a check, optionally in another dtype."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import chain_of
from ..capture.deep_copies import deep_copies
from ..input_error import InputTypeError


def copy_of(model: nn.Module, loss_fn: Any, dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
    """Copy a model and its loss, without gradients. Tensors that they share are shared by the copies.

    A loss function that uses the model or its parameters, from its closure or its globals, uses those of the copy.

    Args:
        model, loss_fn: the originals.
        dtype: the dtype to cast floating point numbers to; None to keep theirs.

    Raises:
        TypeError: a layer or the loss cannot be copied.
    """
    try:
        copied, loss = deep_copies(model, loss_fn)
    except Exception as error:
        raise InputTypeError(
            f"a check trains copies, and {_uncopied(model)} cannot be copied: copy.deepcopy raises "
            f"{type(error).__name__}: {error}. Give it a __deepcopy__, or keep what cannot be copied outside of it"
        ) from error
    copied.zero_grad(set_to_none=True)
    if dtype is not None:
        seen: dict[Tensor, Tensor] = {}
        for module in (copied, *([loss] if isinstance(loss, nn.Module) else [])):
            _cast_module(module, dtype, seen)
    return copied, _rebound(loss, _copies_by_id(model, copied))


def own_dtype(model: nn.Module, sample: Any) -> str:
    """Return the floating point dtypes of a model's parameters and buffers, or of its sample if it has none."""
    for items in ([*model.parameters(), *model.buffers()], pytree.tree_leaves(sample)):
        dtypes = {str(t.dtype) for t in items if isinstance(t, Tensor) and t.is_floating_point()}
        if dtypes:
            return ", ".join(sorted(name.removeprefix("torch.") for name in dtypes))
    return "own"


def cast(nest: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Copy a nest of tensors to a device, and convert floating point tensors to a dtype if one is given."""

    def one(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device, wanted, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, one, nest)


@torch.no_grad()
def take_over(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Copy values into the parameters and buffers of a model, by name."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = tensors.get(name)
        if value is not None and value.shape == tensor.shape:
            tensor.copy_(value if value.layout == tensor.layout else value.to_sparse(layout=tensor.layout))


def _cast_module(module: nn.Module, dtype: torch.dtype, seen: dict[Tensor, Tensor]) -> None:
    """Cast in place. A parameter or buffer with two names stays one tensor."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = seen.setdefault(buffer, buffer.to(dtype))


def _copies_by_id(model: nn.Module, copied: nn.Module) -> dict[int, Any]:
    """Return the copy of each module, parameter and buffer by the identity of the original."""
    kinds = (nn.Module.modules, nn.Module.parameters, nn.Module.buffers)
    pairs = [pair for kind in kinds for pair in zip(kind(model), kind(copied), strict=True)]
    return {id(original): copy for original, copy in pairs}


def _rebound(function: Any, copies: Mapping[int, Any]) -> Any:
    """Return a function that uses copies where it used the originals; the function itself if it uses none."""
    if isinstance(function, functools.partial):
        return functools.partial(_rebound(function.func, copies), *function.args, **function.keywords)
    if not isinstance(function, FunctionType):
        return function
    cells = function.__closure__ or ()
    try:
        contents = [cell.cell_contents for cell in cells]
    except ValueError:  # a variable that is not set yet
        return function
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    named = {name: copies[id(value)] for name, value in named.items() if id(value) in copies}
    if not named and not any(id(value) in copies for value in contents):
        return function
    bound = FunctionType(
        function.__code__,
        {**function.__globals__, **named} if named else function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(CellType(copies.get(id(value), value)) for value in contents),
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _uncopied(model: nn.Module) -> str:
    for name, layer in chain_of(model).places:
        try:
            copy.deepcopy(layer)
        except Exception:
            return f"layer {name!r} ({type(layer).__name__})"
    return "the model with its loss"
