"""Computes what ranks compare of their mini-batches: the layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture import Live, fingerprint

_PLAIN = bool | int | float | str | type(None)


def forms(nests: Iterable[Any]) -> list[Any]:
    """Return the parts of a mini-batch that determine message shapes: layouts of tensors, and all other values."""
    entries: list[Any] = []
    for nest in nests:
        leaves, spec = pytree.tree_flatten(nest)
        entries.append(fingerprint(nest.recording) if isinstance(nest, Live) else str(spec))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout
                entries.append((tuple(leaf.shape), layout, leaf.dtype, leaf.requires_grad))
            else:
                entries.append(leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__)
    return entries


def digest(value: Any) -> str:
    """Return a short text that is equal for equal values."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
