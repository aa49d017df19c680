"""Adds a product of matrices to one that is there, in one pass over it where that is the same to the bit.

The gradient of a large weight is longest in memory: made, read and added, where a matrix product could add to what is
there as it goes (BLAS, gemm with beta 1). Whether the bits are those of a product and a sum depends on how a library
parts the inner dimension; that is tried once for each shape, on random numbers, and only what came out equal is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 2**16  # numbers in a matrix that is worth it, and that shows a difference if there is one
_MOST_SHAPES = 64  # of one matrix that are tried; sequences may be of any length
_DTYPES = frozenset({torch.float32, torch.float64})
_ALIGNED = 64  # bytes; libraries may sum in another order where memory is not

_Matrix = tuple[torch.dtype, int, int, int, str]
_Inner = tuple[int, bool, bool]  # the inner dimension, and whether the factors lie in memory by row
_equal: dict[_Matrix, dict[_Inner, bool]] = {}


def add_product(into: Tensor, left: Tensor, right: Tensor) -> bool:
    """Adds ``left @ right`` to a matrix on the CPU, with the bits of ``into.add_(left @ right)``.

    Args:
        into: [m, n].
        left, right: [m, k] and [k, n].

    Returns:
        Whether it has; where it may not be the same, or is not worth it, nothing has happened.
    """
    if into.numel() < _LEAST or into.dtype not in _DTYPES or into.device.type != "cpu":
        return False
    if not (into.dtype == left.dtype == right.dtype and into.is_contiguous()):
        return False
    if not all(factor.is_contiguous() or factor.t().is_contiguous() for factor in (left, right)):
        return False
    if into.data_ptr() % _ALIGNED or not _is_same(into, left, right):
        return False
    into.addmm_(left, right)
    return True


def _is_same(into: Tensor, left: Tensor, right: Tensor) -> bool:
    rows, columns = into.shape
    matrix = into.dtype, rows, columns, torch.get_num_threads(), torch.get_float32_matmul_precision()
    tried = _equal.setdefault(matrix, {})
    inner = left.shape[1], left.is_contiguous(), right.is_contiguous()
    if inner not in tried:
        tried[inner] = len(tried) < _MOST_SHAPES and _try(into, left, right)
    return tried[inner]


def _try(into: Tensor, left: Tensor, right: Tensor) -> bool:
    source = torch.Generator().manual_seed(0)
    total, one, other = (_random_like(tensor, source) for tensor in (into, left, right))
    expected = total + one @ other
    return torch.equal(total.addmm_(one, other), expected)


def _random_like(tensor: Tensor, source: torch.Generator) -> Tensor:
    """Random numbers that lie in memory as a tensor's do."""
    return torch.empty_like(tensor, requires_grad=False).normal_(generator=source)
