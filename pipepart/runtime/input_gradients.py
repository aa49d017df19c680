"""Collects the gradients of a stage's input in their original memory layout.

A leaf's ``grad`` has the layout of the leaf. If the gradient has another layout, ``grad`` is a copy, and the previous
stage would sum the copy in another order than the plain model does. So nodes between the leaves and the layers catch
the gradients, at two Python calls each, until gradients of an input of this shape are known to have its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

_MOST = 256  # maximum number of remembered layouts: sequences may have any length


class Awaited(NamedTuple):
    """The leaves of one input, and the gradient that was caught for each; None if ``grad`` is used."""

    leaves: tuple[Tensor, ...]
    caught: list[Tensor | None] | None


class InputGradients:
    """Collects the gradients of a stage's inputs. Used by the stage's worker only."""

    def __init__(self) -> None:
        self._plain: set[Any] = set()

    def await_for(self, leaves: tuple[Tensor, ...]) -> Awaited:
        """Return what :meth:`collect` needs; called before the forward."""
        if not leaves or _layout(leaves) in self._plain:
            return Awaited(leaves, None)
        caught: list[Tensor | None] = [None] * len(leaves)
        return Awaited(leaves, caught)

    def collect(self, awaited: Awaited) -> list[Tensor | None]:
        """Return the gradients after the backward; None for a leaf that was not used."""
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
