"""Wraps a tensor that autograd saves: when autograd frees the tensor, the wrapper is deleted."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Saved:
    """Held by autograd as long as it would hold the tensor.

    Args:
        tensor: without its graph: an output of the node that saves it would keep that node alive.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def unpacked(held: Any) -> Tensor:
    """The unpack hook: return the tensor that was saved."""
    return held.tensor if isinstance(held, Saved) else held
