"""Finds sizes of tensors that depend on values, and the calls that compute these sizes in a replay.

::

    kept = x[mask]                  the size is a number of True in the mask
    n = kept.shape[0]               the model reads it: a replay checks that it is the same

Sizes of tensors that are computed from these depend on the same values. What a whole module returns may have any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....autograd.own_copy import tensors
from ..refusal import SkeletonError, line_of_user
from ..replay.calls import Call
from ..replay.given import Ref
from .tables import words

_BY_VALUES = words(
    "nonzero argwhere masked_select unique _unique _unique2 unique_consecutive unique_dim unique_dim_consecutive "
    "bincount one_hot repeat_interleave tensor_split _pack_padded_sequence _pad_packed_sequence"
)


class Sizes:
    """The calls that determine the sizes of tensors, where the shapes of the model's arguments do not.

    Args:
        of_arguments: returns True if tensors can be computed from the model's arguments, before the first layer.
    """

    def __init__(self, of_arguments: Callable[[Iterable[int]], bool]) -> None:
        self._of_arguments = of_arguments
        self._origins: dict[int, frozenset[_Origin]] = {}

    def note(self, call: Call, leaves: Sequence[Any], own: bool) -> None:
        """Note what the sizes of a call's results depend on.

        Args:
            call: the call.
            leaves: what it returned.
            own: whether it may return tensors of any size, as modules do.
        """
        before = frozenset[_Origin]().union(
            *(self._origins.get(number, frozenset()) for number in call.given.numbers())
        )
        if len(call.new) > 1 and not own:  # so many parts as there are
            self._read(before)
        for out, leaf in zip(call.outs, leaves, strict=True):
            if type(out) is Ref and out.number in call.new:
                origins = frozenset((_Origin(call, out.number, leaf.shape),)) if own else before
                if origins:
                    self._origins[out.number] = origins

    def guard(self, call: Call, asking: Call) -> None:
        """Note that ``asking`` computes the sizes of a call's results. It is checked once the model reads a size."""
        asking.asked = False
        for number in call.new:
            self._origins[number] = self._origins.get(number, frozenset()) | {_Origin(asking)}

    def read(self, number: int) -> None:
        """Note that the model has read the size of a tensor: replays check that it is the same.

        Raises:
            SkeletonError: it depends on values that cannot be asked before the first layer.
        """
        self._read(self._origins.get(number, frozenset()))

    def _read(self, origins: frozenset[_Origin]) -> None:
        for call, number, shape in origins:
            if shape is not None:
                call.shapes = {**call.shapes, number: shape}
            elif self._of_arguments(call.given.numbers()):
                call.asked = True
            else:
                raise SkeletonError(
                    f"the size of a tensor made at {call.line} depends on values that modules compute, and is "
                    f"read at {line_of_user()}: the code that follows may do other things for other values. Move that "
                    "code into a module of its own, or compute with masks (torch.where)"
                )


class _Origin(NamedTuple):
    """A call that asks for a size; or that of a whole module, which returned a tensor of this number and shape."""

    call: Call
    number: int = -1
    shape: torch.Size | None = None


def depend_on_values(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Return True if the sizes of what a function returns depend on more than the sizes of its arguments."""
    if name == "__getitem__":
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors(args[1]))
    return name in _BY_VALUES or (name == "where" and len(args) + len(kwargs) == 1)


def sizes_of(*results: Tensor) -> list[int]:
    """Return the sizes of tensors, one after the other."""
    return [size for result in results for size in result.shape]
