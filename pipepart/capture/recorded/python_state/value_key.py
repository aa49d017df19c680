"""Keys of Python values: equal if the values are equal and hold the same, so that a change shows as another key."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar
from typing import Any

import numpy as np
from torch import Tensor, nn

from ....autograd.in_place import version
from .places import CLOSED, DEPTH, ITEMS, PLAIN, held_by


class Same:
    """An object that equals itself only, and is kept, so that its id is not given to another."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_DEPTH = 3 * DEPTH  # an object within an object takes two steps, and settings are nested


def value_key(value: Any, depth: int = _DEPTH, seen: set[int] | None = None) -> Hashable:
    """Return a key of a value and of what it holds; tensors, modules and functions count as themselves."""
    kind = type(value)  # isinstance() would ask objects with a __getattribute__ of their own
    if issubclass(kind, PLAIN) and kind.__hash__ is not None:
        return kind, value
    seen = set() if seen is None else seen
    if issubclass(kind, type):
        return Same(value), tuple([item for item in vars(value).values() if isinstance(item, PLAIN)])
    if issubclass(kind, Tensor):
        return Same(value), None if isinstance(value, nn.Parameter) else version(value)
    if id(value) in seen or issubclass(kind, CLOSED) or not depth:
        return Same(value)
    seen.add(id(value))
    if issubclass(kind, dict | list | tuple | set | frozenset | deque):
        if len(value) > ITEMS:
            return Same(value), len(value)
        if issubclass(kind, dict):
            found = [
                (value_key(key, depth - 1, seen), value_key(item, depth - 1, seen))
                for key, item in value.items()
            ]
            return kind, tuple(found)
        return kind, tuple([value_key(item, depth - 1, seen) for item in value])
    if issubclass(kind, ContextVar):
        return Same(value), value_key(value.get(None), depth - 1, seen)
    if issubclass(kind, array):
        return Same(value), value.tobytes()
    if isinstance(value, np.ndarray):
        return Same(value), value.tobytes() if value.size <= ITEMS and not value.dtype.hasobject else ()
    found = [(name, value_key(item, depth - 1, seen)) for name, item in held_by(value)]
    return Same(getattr(value, "__func__", value)), tuple(found)
