"""Sketches: two numbers per tensor, to check that ranks have equal tensors up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_WIDTH = 4096  # of the rows that a tensor is cut into
_TOLERANCE = 0.01  # of the norm; half precision rounds to 0.004

Sketches = tuple[tuple[float, float] | None, ...]


def sketches(tensors: Iterable[Tensor | None]) -> Sketches:
    """Return for each tensor its norm and the sum of its elements with random signs; None for None.

    The second number is a random projection: two tensors at a distance of d differ in it by about d, wherever their
    elements differ. In their norms or plain sums, gradients of different labels hardly differ.
    """
    return tuple(None if tensor is None else _sketch(tensor.detach()) for tensor in tensors)


def are_close(one: Sketches, other: Sketches) -> bool:
    """Return True if two lists of sketches can come from equal tensors on different devices."""
    if len(one) != len(other):
        return False
    for ours, theirs in zip(one, other, strict=True):
        if ours is None or theirs is None:
            if ours is not theirs:
                return False
        elif all(map(math.isfinite, (*ours, *theirs))):
            allowed = _TOLERANCE * max(ours[0], theirs[0])
            if abs(ours[0] - theirs[0]) > allowed or abs(ours[1] - theirs[1]) > allowed:
                return False
    return True


def _sketch(tensor: Tensor) -> tuple[float, float]:
    flat = tensor.to_dense().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    rows = torch.nn.functional.pad(flat.float(), (0, -len(flat) % _WIDTH)).view(-1, _WIDTH)
    signs = torch.Generator().manual_seed(0)
    across, down = (
        (torch.randint(2, (count,), generator=signs) * 2.0 - 1.0).to(rows.device)
        for count in rows.shape[::-1]
    )
    return float(rows.norm()), float(rows @ across @ down)
