"""Capture of an ``nn.Sequential``: its layers in order, with shapes from fake tensors."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree as pytree

from ..autograd.sparse import bytes_of
from .graph import LayerGraph, LayerInfo, SharedTensor, TensorSpec
from .restore import untouched

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def flatten(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of an ``nn.Sequential`` in order, nested ones opened, each with its path in ``model``.

    A nested ``nn.Sequential`` with hooks or a ``forward`` of its own stays one layer.

    Raises:
        TypeError: ``model`` is no ``nn.Sequential``, or has a ``forward`` of its own.
        ValueError: it holds no layer, or a lazy one whose parameters have no shape yet.
    """
    layers = _checked_layers(model)
    if _has_hooks(model):
        warnings.warn(
            f"hooks on the outermost {type(model).__name__} do not run in a pipeline: put them on its layers",
            stacklevel=3,
        )
    return layers


def describe(model: nn.Module) -> list[LayerInfo]:
    """What can be said of each layer of an ``nn.Sequential`` without a sample: all but its outputs.

    Raises:
        TypeError, ValueError: as :func:`flatten` does.
    """
    return _infos(_checked_layers(model))


def _checked_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Sequential, got {type(model).__name__}: {model!r:.80}")
    if not _runs_children_in_order(model):
        why = "has a forward of its own" if isinstance(model, nn.Sequential) else "is no nn.Sequential"
        raise TypeError(
            f"{type(model).__name__} {why}, so its layers cannot be cut apart: "
            "write it as nn.Sequential(layer, layer, ...)"
        )
    if any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in state_of(model)):
        raise ValueError("the model holds lazy layers without shapes: call it once on a sample first")
    layers = list(_layers(model, ""))
    if not layers:
        raise ValueError(f"the {type(model).__name__} holds no layers")
    return layers


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        if _runs_children_in_order(child) and not _has_hooks(child) and len(child._modules):
            yield from _layers(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child


def _runs_children_in_order(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential):
        return False
    return "forward" not in vars(module) and type(module).forward is nn.Sequential.forward


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def capture(model: nn.Module, /, *args: Any, **kwargs: Any) -> LayerGraph:
    """The layer graph of an ``nn.Sequential``.

    Shapes come from fake tensors: no layer computes, no BatchNorm statistic, gradient or random state changes.
    A layer that fake tensors cannot pass (its control flow reads values) runs once, on a copy in evaluation mode.

    Args:
        model: the ``nn.Sequential``; nested ones are opened, names stay those of the model.
        args, kwargs: the arguments of the model, tensors or nests of tensors.

    Raises:
        TypeError: ``model`` is no ``nn.Sequential``.
        Exception: whatever a layer raises on its input, with a note that names the layer.
    """
    layers = flatten(model)
    infos = []
    given = (args, kwargs)
    with untouched(model), torch.no_grad():
        for (name, layer), info in zip(layers, _infos(layers), strict=True):
            value = _fake_call(name, layer, *given)
            infos.append(info.model_copy(update={"outputs": tensor_specs(value)}))
            given = ((value,), {})
    return LayerGraph.chain(infos, tensor_specs((args, kwargs)))


def state_of(layer: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a layer, by which layers that share one are known."""
    yield from layer.parameters()
    yield from layer.buffers()


def tensor_specs(value: Any) -> tuple[TensorSpec, ...]:
    """The specs of all tensors in a nest."""
    return tuple(TensorSpec.of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _infos(layers: Sequence[tuple[str, nn.Module]]) -> list[LayerInfo]:
    owners: dict[Tensor, tuple[str, str]] = {}
    return [_info(name, layer, owners) for name, layer in layers]


def _info(name: str, layer: nn.Module, owners: dict[Tensor, tuple[str, str]]) -> LayerInfo:
    """Describe one layer. ``owners`` maps each tensor to the first layer that holds it, and its path there."""
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    state = [*parameters.values(), *buffers.values()]
    shared = tuple(
        SharedTensor(
            layer=owners[tensor][0],
            name=owners[tensor][1],
            bytes=bytes_of(tensor),
            gradient_bytes=bytes_of(tensor) if tensor.requires_grad else 0,
        )
        for tensor in state
        if tensor in owners
    )
    own = [p for p in parameters.values() if p not in owners]
    own_buffers = [b for b in buffers.values() if b not in owners]
    for path, tensor in (*parameters.items(), *buffers.items()):
        owners.setdefault(tensor, (name, path))
    return LayerInfo(
        name=name,
        kind=type(layer).__name__,
        description=_describe(layer),
        parameter_bytes=sum(p.nbytes for p in own),
        gradient_bytes=sum(p.nbytes for p in own if p.requires_grad),
        buffer_bytes=sum(bytes_of(b) for b in own_buffers),
        dtypes=_dtypes(state),
        shared=shared,
    )


def _dtypes(state: Sequence[Tensor]) -> tuple[str, ...]:
    counting = {t.dtype for t in state if t.dtype.is_floating_point or t.dtype.is_complex}
    return tuple(sorted(str(dtype).removeprefix("torch.") for dtype in counting))


def _describe(layer: nn.Module) -> str:
    """The class and its arguments, without what differs from one process to the next: where a function lies."""
    text = _ADDRESS.sub("", repr(layer).split("\n", 1)[0])
    return text if text.endswith(")") else type(layer).__name__


def _fake_call(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer's output in shape and dtype only: fake tensors, which have no values."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _quiet():
            state: dict[str, Tensor] = {
                key: mode.from_tensor(tensor.detach())
                for key, tensor in (*layer.named_parameters(), *layer.named_buffers())
            }
            return torch.func.functional_call(layer, state, _as_fake(args), _as_fake(kwargs))
    except Exception:
        pass  # fake tensors reach less far than real ones: what counts is the real layer's verdict
    try:
        return copy.deepcopy(layer).eval()(*_as_real(args), **_as_real(kwargs))
    except Exception as error:
        error.add_note(
            f"pipepart: layer {name!r} ({type(layer).__name__}), while its output's shape was found"
        )
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging what a fake tensor could not do: the real layer speaks for itself."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _as_fake(value: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device), value
    )


def _as_real(value: Any) -> Any:
    """Zeros in place of fake tensors, which have no values."""
    return pytree.tree_map_only(
        Tensor,
        lambda t: (
            torch.zeros(tuple(t.shape), dtype=t.dtype, device=t.device) if isinstance(t, FakeTensor) else t
        ),
        value,
    )
