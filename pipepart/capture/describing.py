"""Describes the layers of a chain: their classes, bytes, shared tensors and output tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..autograd.own_copy import tensors
from ..autograd.sparse import bytes_of
from .chain import Chain
from .layer_info import LayerInfo, SharedTensor, TensorSpec
from .sequential import sequential_layers

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe(
    model: nn.Module | Chain, outputs: Sequence[tuple[TensorSpec, ...]] | None = None
) -> list[LayerInfo]:
    """Describe the layers of a chain without running them.

    Args:
        model: the chain, or an ``nn.Sequential``.
        outputs: the specs of each layer's outputs, if they are known.

    Raises:
        TypeError, ValueError: as :func:`flatten` does.
    """
    chain = model if isinstance(model, Chain) else Chain(model, sequential_layers(model))
    owners: dict[Tensor, tuple[str, str]] = {}
    specs = [()] * len(chain.layers) if outputs is None else outputs
    infos = [
        _info(name, layer, owners, spec) for (name, layer), spec in zip(chain.layers, specs, strict=True)
    ]
    return [
        info.model_copy(update=chain.groups[info.name]._asdict()) if chain.groups else info for info in infos
    ]


def tensor_specs(value: Any) -> tuple[TensorSpec, ...]:
    """Return the specs of all tensors in a nest."""
    return tuple(map(TensorSpec.of, tensors(value)))


def _info(
    name: str, layer: nn.Module, owners: dict[Tensor, tuple[str, str]], outputs: tuple[TensorSpec, ...]
) -> LayerInfo:
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
    parameters_here = [p for p in parameters.values() if p not in owners]
    own_buffers = [b for b in buffers.values() if b not in owners]
    for path, tensor in (*parameters.items(), *buffers.items()):
        owners.setdefault(tensor, (name, path))
    return LayerInfo(
        name=name,
        kind=type(layer).__name__,
        description=_describe(layer),
        parameter_bytes=bytes_of(parameters_here),
        gradient_bytes=bytes_of([p for p in parameters_here if p.requires_grad]),
        buffer_bytes=sum(bytes_of(b) for b in own_buffers),
        dtypes=_dtypes(state),
        shared=shared,
        outputs=outputs,
    )


def _dtypes(state: Sequence[Tensor]) -> tuple[str, ...]:
    counting = {t.dtype for t in state if t.dtype.is_floating_point or t.dtype.is_complex}
    return tuple(sorted(str(dtype).removeprefix("torch.") for dtype in counting))


def _describe(layer: nn.Module) -> str:
    """Return the class and its arguments, without memory addresses, which differ between processes."""
    text = _ADDRESS.sub("", repr(layer).split("\n", 1)[0])
    return text if text.endswith(")") else type(layer).__name__
