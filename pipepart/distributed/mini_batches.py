"""Computes what ranks compare of their mini-batches: layouts and some of the values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture import Live, fingerprint

_PLAIN = bool | int | float | str | type(None)
_SAMPLES = 1024  # numbers of each tensor that are compared between ranks


def forms(nests: Iterable[Any]) -> list[Any]:
    """Return the parts of a mini-batch that determine message shapes: layouts of tensors, and all other values."""
    entries: list[Any] = []
    before = None
    for nest in nests:
        if type(nest) is Tensor and nest.layout is torch.strided:
            layout = nest.shape, nest.stride(), nest.dtype, nest.requires_grad
            if layout == before:  # those of one layout in a row are named once
                entries[-1] += 1
            else:
                entries += [layout, 1]
            before = layout
            continue
        before = None
        leaves, spec = pytree.tree_flatten(nest)
        entries.append(fingerprint(nest.recording) if isinstance(nest, Live) else str(spec))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout
                entries.append((tuple(leaf.shape), layout, leaf.dtype, leaf.requires_grad))
            else:
                entries.append(leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__)
    return entries


def values(nest: Any) -> list[Any]:
    """Return some evenly spread numbers of each tensor, on the CPU."""
    tensors = []
    for leaf in pytree.tree_leaves(nest):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
            flat = leaf.detach().reshape(-1) if leaf.is_contiguous() else leaf.detach().flatten()
            step = max(1, len(flat) // _SAMPLES)
            tensors.append(flat[::step].contiguous().view(torch.uint8).numpy().tobytes())
    return tensors


def digest(value: Any) -> str:
    """Return a short text that is equal for equal values."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
