"""Adds a matrix product to a weight's gradient in one pass (BLAS gemm with beta 1) if the result is equal to the bit.

A separate product and sum writes and reads a matrix of the weight's size once more. For few rows that costs more than
the product: 1.08 against 0.36 ms for a 1024 x 1024 weight and 8 rows, 4.97 against 4.12 ms for 128 rows (one thread).

Whether both ways round equally depends on how the library divides the inner dimension. The library chooses by data
type, shapes, memory order, 64-byte alignment and threads, and never by values. So one comparison on random numbers
decides for all products that agree in these properties: with 65,536 elements or more, a different order of sums shows
in some of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_MIN_ELEMENTS = 2**16  # smaller matrices gain nothing, and might not show a difference
_MAX_SHAPES = 64  # compared per matrix; sequences may have any length
_DTYPES = frozenset({torch.float32, torch.float64})
_ALIGNMENT = 64  # bytes

_Matrix = tuple[torch.dtype, int, int, int, str]
_Inner = tuple[int, bool, bool]  # inner dimension, and whether each factor is row-major
_equal: dict[_Matrix, dict[_Inner, bool]] = {}


def add_product(into: Tensor, left: Tensor, right: Tensor) -> bool:
    """Add ``left @ right`` to a CPU matrix if that gives the bits of ``into.add_(left @ right)``.

    Args:
        into: [m, n].
        left, right: [m, k] and [k, n].

    Returns:
        Whether it was added; otherwise nothing has changed.
    """
    if into.numel() < _MIN_ELEMENTS or into.dtype not in _DTYPES or into.device.type != "cpu":
        return False
    if not (into.dtype == left.dtype == right.dtype and into.is_contiguous()):
        return False
    if not all(factor.is_contiguous() or factor.t().is_contiguous() for factor in (left, right)):
        return False
    if any(matrix.data_ptr() % _ALIGNMENT for matrix in (into, left, right)):
        return False
    if not _is_equal(into, left, right):
        return False
    into.addmm_(left, right)
    return True


def _is_equal(into: Tensor, left: Tensor, right: Tensor) -> bool:
    rows, columns = into.shape
    matrix = into.dtype, rows, columns, torch.get_num_threads(), torch.get_float32_matmul_precision()
    compared = _equal.setdefault(matrix, {})
    inner = left.shape[1], left.is_contiguous(), right.is_contiguous()
    if inner not in compared:
        with _disable_current_modes():  # done once: it is not to be counted as memory of a step
            compared[inner] = len(compared) < _MAX_SHAPES and _compare(into, left, right)
    return compared[inner]


def _compare(into: Tensor, left: Tensor, right: Tensor) -> bool:
    source = torch.Generator().manual_seed(0)
    total, one, other = (_random_like(tensor, source) for tensor in (into, left, right))
    expected = total + one @ other
    return torch.equal(total.addmm_(one, other), expected)


def _random_like(tensor: Tensor, source: torch.Generator) -> Tensor:
    """Random numbers in the same memory order, 64-byte aligned as torch allocates."""
    return torch.empty_like(tensor, requires_grad=False).normal_(generator=source)
