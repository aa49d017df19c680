"""Formats numbers for tables, with a common unit for all times of a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..units import format_bytes

NONE = "–"


class Quantity(str):
    """A formatted number with its value in seconds, bytes or parts of 1, by which tables sort."""

    value: float

    def __new__(cls, text: str, value: float) -> Quantity:
        """Attach the value to its text."""
        quantity = super().__new__(cls, text)
        quantity.value = value
        return quantity


@dataclass(frozen=True)
class TimeUnit:
    """A unit of time and the number of decimals to show."""

    name: str
    seconds: float
    digits: int

    @classmethod
    def for_all(cls, seconds: Iterable[float]) -> TimeUnit:
        """Choose the unit in which the largest of the times has three or four significant digits."""
        largest = max(seconds, default=0.0)
        name, unit = next(
            ((name, unit) for name, unit in (("s", 1.0), ("ms", 1e-3)) if largest >= unit), ("µs", 1e-6)
        )
        return cls(name, unit, digits=3 if largest < 10 * unit else 2 if largest < 100 * unit else 1)

    def text(self, seconds: float) -> str:
        """Format the number without its unit, which is in the header of the column."""
        least = 10**-self.digits
        if seconds == 0:
            text = NONE
        elif seconds / self.seconds < least / 2:
            text = f"<{least:.{self.digits}f}"
        else:
            text = f"{seconds / self.seconds:,.{self.digits}f}"
        return Quantity(text, seconds)


def size(count: int | None) -> str:
    """Format bytes; zero and None are a dash."""
    return Quantity(format_bytes(count) if count else NONE, count or 0)


def percent(part: float) -> str:
    """Format a fraction as percent."""
    return Quantity("<1%" if 0 < part < 0.005 else f"{part:.0%}", part)


def longer(ratio: float, equal: str, digits: int = 0) -> str:
    """Format a ratio of two durations, as in "25% longer"; ``equal`` if the percentage rounds to 0.

    >>> longer(1.25, "as predicted"), longer(0.8, "as predicted"), longer(1.001, "as predicted")
    ('25% longer', '20% shorter', 'as predicted')
    """
    off = ratio - 1
    if abs(off) < 0.005 / 10**digits:
        return equal
    return f"{abs(off):.{digits}%} {'longer' if off > 0 else 'shorter'}"


def printable(text: str) -> str:
    r"""Escape control characters, which could change the terminal; layer names can hold any.

    >>> printable("layer\x1b[31m")
    'layer\\x1b[31m'
    """
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
