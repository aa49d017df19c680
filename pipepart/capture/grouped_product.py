"""Meta kernel for ``grouped_mm``, the matrix product of mixtures of experts: returns the shape and dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_product(
    one: Tensor,
    other: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return an empty tensor like the result of ``grouped_mm``. Torch's own meta kernel accepts bfloat16 only."""
    if one.dim() == other.dim() == 2:
        groups = () if offsets is None else tuple(offsets.shape)
        return one.new_empty((*groups, one.shape[0], other.shape[1]), dtype=out_dtype)
    batch = (one.shape[0],) if one.dim() == other.dim() else ()
    return one.new_empty((*batch, one.shape[-2], other.shape[-1]), dtype=out_dtype)
