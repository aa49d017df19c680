"""Relative errors between two sets of tensors, each by the norm of its tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[Any, Tensor | None]

# The error of a tensor is relative to its own norm, or to this part of the norm of all tensors if that is larger: a
# gradient that is zero except for rounding would otherwise have a large error.
_SMALL = 1e-2


def tensor_errors(ours: Tensors, theirs: Tensors) -> dict[Any, float]:
    """Return the relative error of each tensor, by norm.

    0 if it is equal bit for bit, where NaN equals NaN. Infinite if only one side has it, or finite numbers in it.
    """
    floor = _SMALL * math.hypot(*(_norm(tensor) for tensor in theirs.values() if tensor is not None), 0.0)
    names = dict.fromkeys([*theirs, *ours])
    return {name: relative_error(ours.get(name), theirs.get(name), floor) for name in names}


def largest_error(ours: Tensors, theirs: Tensors) -> float:
    """Return the largest error of any tensor."""
    return max(tensor_errors(ours, theirs).values(), default=0.0)


def relative_error(ours: Tensor | None, theirs: Tensor | None, floor: float = 0.0) -> float:
    """Return the error of one tensor as :func:`tensor_errors` does, relative to ``floor`` if its norm is smaller."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if ours.equal(theirs) or bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
        return 0.0
    size = max(_norm(ours), _norm(theirs), floor)
    off = _norm(_wide(ours) - _wide(theirs))
    # The difference of two neighbouring numbers may be 0 in the norm; it must not count as bit for bit.
    return max(off / size, math.ulp(0.0)) if math.isfinite(off) and math.isfinite(size) else math.inf


def _norm(tensor: Tensor) -> float:
    return float(_wide(tensor).norm())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
