"""Splits a mini-batch into micro-batches and gathers their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def batch_size(sample: Any, target: Any = None) -> int:
    """Samples in a mini-batch: the extent of dimension 0, which every tensor of sample and target has.

    Raises:
        TypeError: there is no tensor in the sample, or an array or list of samples that is none.
        ValueError: a tensor has no dimension, the extents differ, or there are no samples.
    """
    size = _common_size(sample, "the input", None)
    if size is None:
        raise TypeError(f"the input must hold a tensor, got {type(sample).__name__}")
    if size == 0:
        raise ValueError("the mini-batch holds no samples")
    _common_size(target, "the target", size)
    return size


def _common_size(nest: Any, what: str, size: int | None) -> int | None:
    if isinstance(nest, list) and size and len(nest) == size and not any(isinstance(x, Tensor) for x in nest):
        raise TypeError(
            f"{what} is a list of {size} {type(nest[0]).__name__}: make a tensor of it, torch.tensor(...)"
        )
    for tensor in pytree.tree_leaves(nest):
        if isinstance(tensor, np.ndarray):
            raise TypeError(f"{what} holds a numpy array: make a tensor of it, torch.from_numpy(...)")
        if not isinstance(tensor, Tensor):
            continue
        if tensor.dim() == 0:
            raise ValueError(f"{what} holds a tensor without a batch dimension")
        size = tensor.shape[0] if size is None else size
        if tensor.shape[0] != size:
            raise ValueError(f"{what} has {tensor.shape[0]} samples where the input has {size}")
    return size


def split(nest: Any, parts: int) -> list[Any]:
    """The nest with each tensor split along dimension 0 into ``parts`` parts whose sizes differ by at most one.

    The larger parts come first. Parts are views. What is no tensor goes whole into every part.
    """
    if isinstance(nest, Tensor):
        return list(nest.tensor_split(parts))
    items, spec = pytree.tree_flatten(nest)
    columns = [item.tensor_split(parts) if isinstance(item, Tensor) else [item] * parts for item in items]
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(parts)]


def sizes(batch: int, parts: int) -> list[int]:
    """Samples in each part of :func:`split`."""
    return [batch // parts + (index < batch % parts) for index in range(parts)]


def gather(outputs: Sequence[Any]) -> Any:
    """The outputs of the micro-batches as one of the mini-batch: tensors joined along dimension 0.

    A tensor without dimensions cannot be joined so; several are stacked. What is no tensor is the first's.
    """
    if isinstance(outputs[0], Tensor):
        return _join(outputs)
    columns = [pytree.tree_leaves(output) for output in outputs]
    spec = pytree.tree_structure(outputs[0])
    joined = [
        _join(column) if isinstance(column[0], Tensor) else column[0] for column in zip(*columns, strict=True)
    ]
    return pytree.tree_unflatten(joined, spec)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack(list(tensors)) if tensors[0].dim() == 0 else torch.cat(list(tensors))
