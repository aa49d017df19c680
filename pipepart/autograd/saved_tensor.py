"""What autograd may hold in the place of a tensor that it saves, so that somebody sees when it lets go."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Saved:
    """Held by autograd for as long as it would hold the tensor.

    Args:
        tensor: without its graph: an output of the node that saves it would keep that node alive.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def unpacked(held: Any) -> Tensor:
    """The hook that gives autograd the very tensor that it saved; nothing is computed again."""
    return held.tensor if isinstance(held, Saved) else held
