"""Takes the gradients of a stage's input as they come, memory layout and all.

A leaf's own ``grad`` has the leaf's layout. Where the gradient comes in another, that is a copy, which the stage before
would sum in another order than it does without stages. So gradients are caught on their way, which costs two calls into
Python each, until those of an input of this shape are seen to come in its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

_MOST = 256  # layouts that are remembered; sequences may be of any length


class Awaited(NamedTuple):
    """The leaves of one input, and a place for the gradient of each; None where ``grad`` is as good."""

    leaves: tuple[Tensor, ...]
    caught: list[Tensor | None] | None


class InputGradients:
    """What a stage knows of the gradients of its inputs. Used by its worker alone."""

    def __init__(self) -> None:
        self._plain: set[Any] = set()

    def await_for(self, leaves: tuple[Tensor, ...]) -> Awaited:
        """Before the forward: what :meth:`collect` will need."""
        if not leaves or _layout(leaves) in self._plain:
            return Awaited(leaves, None)
        caught: list[Tensor | None] = [None] * len(leaves)
        for index, leaf in enumerate(leaves):
            leaf.register_hook(partial(caught.__setitem__, index))
        return Awaited(leaves, caught)

    def collect(self, awaited: Awaited) -> list[Tensor | None]:
        """After the backward: the gradients, None for a leaf that nothing used."""
        leaves, caught = awaited
        if caught is None:
            return [leaf.grad for leaf in leaves]
        pairs = zip(leaves, caught, strict=True)
        if all(gradient is not None and gradient.stride() == leaf.stride() for leaf, gradient in pairs):
            if len(self._plain) >= _MOST:
                self._plain.clear()
            self._plain.add(_layout(leaves))
        return caught


def _layout(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(leaf.shape, leaf.stride()) for leaf in leaves])
