"""What has been found out about a loss, by the kind of what it is given."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from .calls import Record
from .follow import Call
from .observe import Rule

_MOST = 64  # kinds; sequences may be of any length


class Known(NamedTuple):
    """What holds for losses of one kind.

    Attributes:
        rule: how they sum up.
        own, whole: what was seen for a micro-batch and for the mini-batch.
        calls: what the loss calls.
        dimension: of the output, along which samples lie.
    """

    rule: Rule
    own: Record
    whole: Record
    calls: list[Call]
    dimension: int


class Memory:
    """Knows of several kinds, as the last micro-batch has a size of its own, or sequences have lengths."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}
        self._forms: set[Any] = set()

    def of(self, kind: Any) -> Known | None:
        """What is known of a kind."""
        return self._known.get(kind)

    def keep(self, kind: Any, known: Known) -> None:
        """Remembers."""
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[kind] = known

    def forget(self, kind: Any) -> None:
        """Something else has been seen."""
        self._known.pop(kind, None)

    def is_new(self, form: Any) -> bool:
        """Whether nothing of this form, whatever its extents, has been asked for before."""
        new = form not in self._forms
        if len(self._forms) >= _MOST:
            self._forms.clear()
        self._forms.add(form)
        return new


def kind_of(*nests: Any) -> Any:
    """Of nested tensors all but the values."""
    return tuple([_kind(nest) for nest in nests])


def form_of(*nests: Any) -> Any:
    """Of nested tensors how many dimensions they have, and of which types they are."""
    leaves = [leaf for leaf in pytree.tree_leaves(nests) if isinstance(leaf, Tensor)]
    return tuple([(leaf.dim(), leaf.dtype) for leaf in leaves])


def _kind(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return nest.shape, nest.dtype, nest.device
    leaves, spec = pytree.tree_flatten(nest)
    return spec, *[_kind(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
