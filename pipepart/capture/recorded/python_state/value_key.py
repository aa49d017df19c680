"""Keys of Python values: equal if the values are equal and hold the same, so that a change shows as another key."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy as np

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


def value_key(value: Any, depth: int = DEPTH, seen: set[int] | None = None) -> Hashable:
    """Return a key of a value and of what it holds; tensors, modules and functions count as themselves."""
    kind = type(value)  # isinstance() would ask objects with a __getattribute__ of their own
    if issubclass(kind, PLAIN):
        return kind, value
    seen = set() if seen is None else seen
    if issubclass(kind, type):
        return Same(value), tuple([item for item in vars(value).values() if isinstance(item, PLAIN)])
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
    if isinstance(value, np.ndarray):
        return Same(value), value.tobytes() if value.size <= ITEMS and not value.dtype.hasobject else ()
    found = [(name, value_key(item, depth - 1, seen)) for name, item in held_by(value)]
    return Same(getattr(value, "__func__", value)), tuple(found)
