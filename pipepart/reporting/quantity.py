"""Figures for a table: one unit for all its times, so that they can be compared by eye."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..profiling import Timing
from ..units import format_bytes

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
        """The number alone; the unit stands in the head of the column."""
        if seconds == 0:
            return NONE
        least = 10**-self.digits
        if seconds / self.seconds < least / 2:
            return f"<{least:.{self.digits}f}"
        return f"{seconds / self.seconds:,.{self.digits}f}"


def spread(timing: Timing) -> str:
    """How far the middle half of the measurements lies from the median, in percent of it."""
    return f"{timing.spread / timing.seconds:.0%}" if timing.seconds else ""


def size(count: int) -> str:
    """A size for people, none as a dash."""
    return format_bytes(count) if count else NONE


def bar(part: float, width: int = 8) -> str:
    """A bar of ``width`` characters at most for a part from 0 to 1, to an eighth of a character."""
    whole, eighths = divmod(round(min(max(part, 0.0), 1.0) * width * 8), 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")


def percent(part: float) -> str:
    """A part of a whole."""
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"
