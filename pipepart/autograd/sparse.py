"""Splits tensors into the dense tensors that hold their data, such as the indices and values of a sparse tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .own_copy import tensors

_BY_ROWS = torch.sparse_csr, torch.sparse_bsr
_BY_COLUMNS = torch.sparse_csc, torch.sparse_bsc


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the indices and values of a sparse tensor, or the shard of a DTensor; others are returned unchanged."""
    if tensor.layout is torch.strided:
        shard = getattr(
            tensor, "_local_tensor", getattr(tensor, "elem", None)
        )  # of a DTensor, or of a collective
        return (tensor,) if shard is None else dense_parts(shard)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def dense_tensors(nest: Any) -> list[Tensor]:
    """Return the tensors of a nest, with the dense parts in place of each sparse tensor."""
    return [part for tensor in tensors(nest) for part in dense_parts(tensor)]


def bytes_of(nest: Any) -> int:
    """Return the bytes of all tensors in a nest."""
    return sum(part.nbytes for part in dense_tensors(nest))


def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    """Call ``record_stream`` on a tensor, or on the dense parts of a sparse tensor, which has no such kernel."""
    for part in dense_parts(tensor):
        part.record_stream(stream)
