"""The tensors that hold the numbers of a sparse one, as an adjacency matrix or the gradient of an embedding is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_BY_ROWS = torch.sparse_csr, torch.sparse_bsr
_BY_COLUMNS = torch.sparse_csc, torch.sparse_bsc


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a sparse tensor consists of, its values last; of any other, itself."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def bytes_of(nest: Any) -> int:
    """The bytes of all tensors in a nest."""
    leaves = (nest,) if isinstance(nest, Tensor) else pytree.tree_leaves(nest)
    return sum(part.nbytes for leaf in leaves if isinstance(leaf, Tensor) for part in dense_parts(leaf))
