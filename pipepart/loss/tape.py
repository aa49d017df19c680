"""What a loss computes from the target alone, kept so that it can be computed for another target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_VALUES = (bool, int, float, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format)
# What these give holds the same values as their first argument, or one truth for each; their shapes are known.
_EVIDENT = frozenset(
    [
        *("flatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous", "detach", "to", "type_as"),
        *(
            "float",
            "double",
            "half",
            "bfloat16",
            "long",
            "int",
            "__getitem__",
            "__get__",
            "size",
            "dim",
            "numel",
        ),
        *("ne", "eq", "gt", "ge", "lt", "le", "__len__", "clone", "argmax"),
    ]
)


class _At(NamedTuple):
    place: int


class _Entry(NamedTuple):
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: int


class Tape:
    """Calls of torch on a target's tensors, in their order.

    Attributes:
        whole: whether nothing is missing, so that it may be played.
        evident: whether it holds no more than the target in other shapes and types, and comparisons with numbers.
    """

    def __init__(self) -> None:
        self.whole = True
        self.evident = True
        self._entries: list[_Entry] = []
        self._places: dict[int, int] = {}
        self._filled = 0

    def begin(self, tensor: Tensor) -> None:
        """Names a tensor of the target; all are, before any call."""
        self._place(tensor)

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Notes a call; without all that it computes from, the tape is no longer whole."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.evident &= function.__name__ in _EVIDENT and sum(isinstance(x, Tensor) for x in leaves) == 1
        if not all(self._is_known(leaf) for leaf in leaves):
            self.whole = False
            return
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not made:
            return
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: _At(self._places[id(t)]), (args, kwargs))
        self._entries.append(_Entry(function, args, kwargs, len(made)))
        for tensor in made:
            self._place(tensor)

    def place(self, tensor: Any) -> int | None:
        """Where a tensor is among those that :meth:`play` gives; None where it is not."""
        return self._places.get(id(tensor))

    def end(self) -> None:
        """No more is asked for by identity, as tensors may go."""
        self._places = {}

    @torch.no_grad()
    def play(self, target: Any) -> list[Tensor]:
        """All tensors for another target, by their places."""
        values = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
        for function, args, kwargs, results in self._entries:
            given = _filled(args, values)
            result = function(*given, **{name: _filled(value, values) for name, value in kwargs.items()})
            made = (
                [result]
                if isinstance(result, Tensor)
                else [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            )
            if len(made) != results:
                raise ValueError("a call that gave another number of tensors")
            values += made
        return values

    def _place(self, tensor: Tensor) -> None:
        self._places[id(tensor)] = self._filled
        self._filled += 1

    def _is_known(self, leaf: Any) -> bool:
        if isinstance(leaf, slice):
            return all(isinstance(bound, int | None) for bound in (leaf.start, leaf.stop, leaf.step))
        return id(leaf) in self._places if isinstance(leaf, Tensor) else isinstance(leaf, _VALUES)


def _filled(value: Any, values: Sequence[Tensor]) -> Any:
    if type(value) is _At:
        return values[value.place]
    if type(value) in (tuple, list):
        return type(value)(_filled(item, values) for item in value)
    return value
