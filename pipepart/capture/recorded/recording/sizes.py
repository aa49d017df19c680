"""Finds calls whose result sizes depend on values, and the calls that compute these sizes in a replay.

::

    kept = x[mask]                  the size is a number of True in the mask
    n = kept.shape[0]               the model reads it: a replay checks that it is the same

Sizes of tensors that are computed from these depend on the same values. What a whole module returns may have any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....autograd.own_copy import tensors
from ..replay.calls import Call

_MASKS = frozenset(("nonzero", "argwhere", "where", "masked_select", "__getitem__"))
_OTHERS = frozenset(
    (
        *(
            "unique",
            "_unique",
            "_unique2",
            "unique_consecutive",
            "unique_dim",
            "unique_dim_consecutive",
            "bincount",
        ),
        *("one_hot", "repeat_interleave", "tensor_split", "_pack_padded_sequence", "_pad_packed_sequence"),
    )
)
VALUE_SIZED = _MASKS | _OTHERS
"""Functions whose results may have sizes that depend on values."""


class SizeOrigin(NamedTuple):
    """The call that determines the size of a tensor, if the shapes of the model's arguments do not.

    Attributes:
        call: asks for the size; or calls the whole module that returned the tensor.
        number: of the tensor that a module returned; None if the call asks.
        shape: of that tensor.
    """

    call: Call
    number: int | None = None
    shape: torch.Size | None = None

    def read(self) -> None:
        """Make replays check the size, because the model has read it."""
        if self.number is None:
            self.call.asked = True
        else:
            assert self.shape is not None
            self.call.shapes = {**self.call.shapes, self.number: self.shape}


def asking(name: str, func: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any] | None:
    """Return the call that computes the result sizes of a function; None if they do not depend on values."""
    if name not in VALUE_SIZED:
        return None
    if name in _OTHERS:
        return _SizesOf(func), args, kwargs
    if name == "__getitem__" or name == "masked_select":
        index = (*args[1:], *kwargs.values())
        masks = [one for one in tensors(index) if one.dtype in (torch.bool, torch.uint8)]
    elif name == "where" and len(args) + len(kwargs) > 1:
        return None
    else:
        masks = list(tensors((args, kwargs)))
    return (count_selected, tuple(masks), {}) if masks else None


def count_selected(*masks: Tensor) -> list[int]:
    """Return the number of nonzero entries of each mask."""
    return [int(torch.count_nonzero(mask)) for mask in masks]


class _SizesOf:
    """Calls a function and returns the sizes of what it returns."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self.__name__ = f"size of {getattr(func, '__name__', func)}"

    def __call__(self, *args: Any, **kwargs: Any) -> list[int]:
        result = pytree.tree_leaves(self._func(*args, **kwargs))
        return [size for leaf in result if isinstance(leaf, Tensor) for size in leaf.shape]
