"""Draws the time axis of a picture, and formats seconds."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log10

from .colours import FAINT, TEXT
from .shapes import Line, Shape, Text

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_FONT = 11
_LEAST = 60  # pixels between two numbers


def time_axis(seconds: float, left: float, y: float, scale: float) -> Iterator[Shape]:
    """Yield a grid line and its label at each round time.

    Args:
        seconds: its length.
        left, y: where it begins, in pixels.
        scale: pixels of a second.
    """
    unit, name = _unit(seconds)
    yield Text(8, y + 14, f"time ({name})", _FONT, TEXT)
    yield Line(left, y + 2, left + seconds * scale, y + 2, FAINT)
    step = _round_step(_LEAST / scale / unit) if seconds else 1.0
    count = floor(seconds / unit / step + 1e-9) if seconds else 0
    for number in range(count + 1):
        x = left + number * step * unit * scale
        yield Line(x, y + 2, x, y + 6, FAINT)
        yield Text(x, y + 14, f"{number * step:g}", _FONT, TEXT, "start" if number == 0 else "middle")


def with_unit(seconds: float) -> str:
    """Format seconds with three digits and a unit.

    >>> with_unit(0.01234), with_unit(33.0)
    ('12.3 ms', '33 s')
    """
    unit, name = _unit(seconds)
    return f"{seconds / unit:.3g} {name}"


def _unit(seconds: float) -> tuple[float, str]:
    return next((each for each in _UNITS if seconds >= each[0]), _UNITS[0])


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... (and 0.5, 0.2, 0.1, ...) that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
