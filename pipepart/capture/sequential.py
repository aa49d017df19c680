"""Finds the layers of an ``nn.Sequential``, in execution order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..input_error import InputError, InputTypeError
from .hooks import has_hooks


def flatten(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of an ``nn.Sequential`` in execution order, each with its path in ``model``.

    A nested ``nn.Sequential`` is opened, unless it has hooks or a ``forward`` of its own.

    Raises:
        TypeError: ``model`` is not an ``nn.Sequential``, or has a ``forward`` of its own.
        ValueError: it has no layers, or a lazy layer whose parameters have no shape yet.
    """
    layers = sequential_layers(model)
    if has_hooks(model):
        warnings.warn(
            f"hooks on the outermost {type(model).__name__} do not run in a pipeline: put them on its layers",
            stacklevel=3,
        )
    return layers


def sequential_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers as :func:`flatten` does, without a warning about hooks."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model must be an nn.Sequential, got {type(model).__name__}: {model!r:.80}")
    if not runs_children_in_order(model):
        why = "has a forward of its own" if isinstance(model, nn.Sequential) else "is no nn.Sequential"
        raise InputTypeError(
            f"{type(model).__name__} {why}, so its layers cannot be cut apart: "
            "write it as nn.Sequential(layer, layer, ...)"
        )
    refuse_lazy(model)
    layers = list(_layers(model, ""))
    if not layers:
        raise InputError(f"the {type(model).__name__} holds no layers")
    return layers


def runs_children_in_order(module: nn.Module) -> bool:
    """Return True for an ``nn.Sequential`` that does not override ``forward``, ``__call__`` or ``__iter__``."""
    if not isinstance(module, nn.Sequential):
        return False
    kind = type(module)
    as_torch = kind.__call__ is nn.Module.__call__ and kind.__iter__ is nn.Sequential.__iter__
    return as_torch and "forward" not in vars(module) and kind.forward is nn.Sequential.forward


def refuse_lazy(model: nn.Module) -> None:
    """Raise a ValueError if a parameter or buffer of a model has no shape yet."""
    if any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in state_of(model)):
        raise InputError("the model holds lazy layers without shapes: call it once on a sample first")


def state_of(layer: nn.Module) -> Iterator[Tensor]:
    """Return the parameters and buffers of a layer."""
    yield from layer.parameters()
    yield from layer.buffers()


def holds_meta(model: nn.Module) -> bool:
    """Return True if a parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in state_of(model))


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        if runs_children_in_order(child) and not has_hooks(child) and len(child._modules):
            yield from _layers(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child
