"""Formats figures for tables, with one unit for all times of a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...profiling import Timing
from ...units import format_bytes

NONE = "–"


@dataclass(frozen=True)
class TimeUnit:
    """A unit of time and the digits behind its point."""

    name: str
    seconds: float
    digits: int

    @classmethod
    def for_all(cls, seconds: Iterable[float]) -> TimeUnit:
        """The unit in which the largest of the times has three or four figures that count."""
        largest = max(seconds, default=0.0)
        name, unit = next(
            ((name, unit) for name, unit in (("s", 1.0), ("ms", 1e-3)) if largest >= unit), ("µs", 1e-6)
        )
        return cls(name, unit, digits=3 if largest < 10 * unit else 2 if largest < 100 * unit else 1)

    def text(self, seconds: float) -> str:
        """Format the number without its unit, which stands in the column's header."""
        if seconds == 0:
            return NONE
        least = 10**-self.digits
        if seconds / self.seconds < least / 2:
            return f"<{least:.{self.digits}f}"
        return f"{seconds / self.seconds:,.{self.digits}f}"


def spread(timing: Timing) -> str:
    """Half the distance between the quartiles, in percent of the median."""
    return f"{timing.spread / timing.seconds:.0%}" if timing.seconds else ""


def size(count: int) -> str:
    """Format bytes; zero is a dash."""
    return format_bytes(count) if count else NONE


def bar(part: float, width: int = 8) -> str:
    """A bar of ``width`` characters at most for a part from 0 to 1, to an eighth of a character."""
    whole, eighths = divmod(round(min(max(part, 0.0), 1.0) * width * 8), 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")


def percent(part: float) -> str:
    """Format a fraction as percent."""
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def printable(text: str) -> str:
    r"""Escape control characters, which could change the terminal; layer names can hold any.

    >>> printable("layer\x1b[31m")
    'layer\\x1b[31m'
    """
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
