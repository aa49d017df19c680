"""The number of samples as a loss reads it, so that what is computed from it is recognised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

_Leak = Callable[[], None]


class Extent(int):
    """An extent of a tensor that grows with the number of samples, with its ``degree``: 1 if in proportion.

    It is a plain number to whoever uses it. A sum that is divided by it is a mean. Where it turns into a number that
    does not show where it comes from, ``leak`` is called.
    """

    degree: int
    leak: _Leak

    def __new__(cls, value: int, degree: int, leak: _Leak) -> Self:
        made = super().__new__(cls, value)
        made.degree, made.leak = degree, leak
        return made

    @property
    def plain(self) -> int:
        """The number itself."""
        return int.__add__(self, 0)

    def __mul__(self, other: Any) -> Any:
        if type(other) is int or isinstance(other, Extent):
            return Extent(int.__mul__(self, other), self.degree + getattr(other, "degree", 0), self.leak)
        return self._lost(int.__mul__, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, Extent) and other.degree == self.degree and not int.__mod__(self, other):
            return int.__floordiv__(self, other)
        return self._lost(int.__floordiv__, other)

    def __eq__(self, other: Any) -> bool:
        return int.__eq__(self, other) if isinstance(other, Extent) else bool(self._lost(int.__eq__, other))

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def _lost(self, operation: Callable[..., Any], *others: Any) -> Any:
        self.leak()
        return operation(self, *others)


def _leaking(name: str) -> Callable[..., Any]:
    operation = getattr(int, name)
    return lambda self, *others: self._lost(operation, *others)


for _name in (
    *(
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__truediv__",
        "__rtruediv__",
        "__rfloordiv__",
        "__mod__",
    ),
    *("__pow__", "__rpow__", "__neg__", "__lt__", "__le__", "__gt__", "__ge__", "__float__", "__int__"),
):
    setattr(Extent, _name, _leaking(_name))
