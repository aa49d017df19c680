"""The numbers of a training step (loss, gradients, state), and the relative error between two trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..relative_errors import Tensors, largest_error

Numbers = Mapping[str, Tensors]  # of one step: "losses", "gradients", "parameters" and "buffers", by name


def copied(tensor: Tensor | None) -> Tensor | None:
    """Return a dense copy of a tensor on the CPU."""
    if tensor is None:
        return None
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.cpu().clone()


def errors(ours: Sequence[Numbers], theirs: Sequence[Numbers]) -> dict[str, float | None]:
    """Return the largest error of any step for each kind of numbers; None for kinds without numbers."""
    differences: dict[str, float | None] = {}
    for kind in theirs[0]:
        some = any(tensor is not None for side in (ours, theirs) for tensor in side[0][kind].values())
        steps = zip(ours, theirs, strict=True)
        differences[kind] = max(largest_error(a[kind], b[kind]) for a, b in steps) if some else None
    return differences


def first_different_step(ours: Sequence[Numbers], theirs: Sequence[Numbers], allowed: float) -> int:
    """Return the first step in which an error exceeds ``allowed``; 0 if there is none."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if max(error or 0.0 for error in errors([mine], [other]).values()) > allowed:
            return step
    return 0
