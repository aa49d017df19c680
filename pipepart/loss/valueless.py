"""Tensors that have shapes and no values, and calls of torch on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def shaped(output: Any, samples: int, wanted: int, dimension: int = 0) -> Any:
    """An output of no values, shaped for another number of samples along a dimension; tensors keep their device."""

    def shape(tensor: Tensor) -> Tensor:
        extents = list(tensor.shape)
        if len(extents) > dimension and extents[dimension] % samples == 0:
            extents[dimension] = extents[dimension] // samples * wanted
        made = torch.empty(extents, dtype=tensor.dtype, device="meta")
        made.pipepart_device = tensor.device  # type: ignore[attr-defined]
        return made

    return pytree.tree_map_only(Tensor, shape, output)


def without_values(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of torch gives, but for the values."""
    if name == "masked_select":
        return torch.Tensor.__getitem__(_meta(args[0]), args[1])
    if name in ("__getitem__", "__setitem__"):  # which of the values are asked for decides the shape
        return func(_meta(args[0]), args[1], *map(_meta, args[2:]))
    kwargs = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
    return func(*all_meta(args), **all_meta(kwargs))


def all_meta(nest: Any) -> Any:
    """The nest with tensors of no values."""
    return pytree.tree_map_only(Tensor, _meta, nest)


def _meta(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_like(value, device="meta")
