"""Python numbers read from tensors, which remember their tensor and notice when they are used.

A replay may read a number for a log again, if the model returns it as it is. Code that compares it, or computes with
it, may take another branch or give another result for the next micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Reading(NamedTuple):
    """The function that reads a Python number, and the number of the tensor that it reads from."""

    func: Callable[..., Any]
    number: int


class ReadInteger(int):
    """An integer read from a tensor."""

    reading: Reading
    note_use: Callable[[], None]


class ReadFloat(float):
    """A floating point number read from a tensor."""

    reading: Reading
    note_use: Callable[[], None]


def as_read(value: Any, reading: Reading, note_use: Callable[[], None]) -> Any:
    """Return a number with its reading; any other value is returned unchanged."""
    kind = {int: ReadInteger, float: ReadFloat}.get(type(value))
    if kind is None:
        return value
    made = kind(value)
    made.reading, made.note_use = reading, note_use
    return made


def plain(value: Any) -> Any:
    """Return a number as a plain int or float; any other value is returned unchanged."""
    if isinstance(value, ReadInteger):
        return int.__add__(value, 0)
    return float.__add__(value, 0.0) if isinstance(value, ReadFloat) else value


def _noting(kind: type, name: str) -> Any:
    plainly = getattr(kind, name)

    def operation(self: Any, *others: Any) -> Any:
        self.note_use()
        return plainly(self, *others)

    return operation


for _kind, _plain_kind in ((ReadInteger, int), (ReadFloat, float)):
    for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "divmod"):
        setattr(_kind, f"__{_name}__", _noting(_plain_kind, f"__{_name}__"))
        setattr(_kind, f"__r{_name}__", _noting(_plain_kind, f"__r{_name}__"))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "neg", "abs", "round", "trunc", "int", "float"):
        setattr(_kind, f"__{_name}__", _noting(_plain_kind, f"__{_name}__"))
    setattr(_kind, "__hash__", _plain_kind.__hash__)  # noqa: B010 - a class with its own __eq__ loses it
ReadInteger.__index__ = _noting(int, "__index__")
