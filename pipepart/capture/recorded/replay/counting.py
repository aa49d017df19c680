"""Finds the calls of a model's own loss that are given numbers which depend on the number of samples.

Most such numbers remember where they come from (:mod:`.numbers`). Those that went through ``len``, ``float``, ``math``
or numpy do not: they show by another value in a recording with one more sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .calls import Call


def with_another_sample(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model with the first sample once more at the end."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    samples = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
    longer = [
        torch.cat([leaf, leaf[:1]])
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dim() and len(leaf) == samples
        else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(longer, spec)


def counting(calls: Sequence[Call], others: Sequence[Call]) -> frozenset[int]:
    """Return the places of the calls whose constants differ between two recordings; the first where calls differ."""
    found = set()
    for place, (call, other) in enumerate(zip(calls, others, strict=False)):
        if call.name != other.name:
            return frozenset((*found, place))
        if not call.given.same_constants(other.given):
            found.add(place)
    if len(calls) != len(others):
        found.add(min(len(calls), len(others)) - 1)
    return frozenset(found)
