"""Drawing: the rectangles, lines, polygons and texts of a picture, independent of the file format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


class PictureError(ValueError):
    """The picture cannot be drawn with these arguments; the message says what to change."""


Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle.

    Args:
        x, y, width, height: in pixels; y grows downwards.
        fill: its colour, as ``#rrggbb``.
        tip: what a viewer shows under the pointer; empty for nothing.
        role: what it is for: ``background``, ``idle`` or ``action``.
    """

    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str = ""
    role: str = "action"


@dataclass(frozen=True, slots=True)
class Line:
    """A thin line from one point to another, in pixels."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon with the given corners, in pixels."""

    corners: Sequence[tuple[float, float]]
    fill: str


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text.

    Args:
        x: of its start, middle or end, as `anchor` says.
        y: of its middle.
        words: the text.
        size: of the font, in pixels.
        color: as ``#rrggbb``.
        anchor: which part of the text is at `x`.
        role: ``text`` on the background, or ``label`` within a box.
    """

    x: float
    y: float
    words: str
    size: float
    color: str
    anchor: Anchor = "start"
    role: str = "text"


Shape = Box | Line | Area | Text


@dataclass(frozen=True)
class Drawing:
    """A picture.

    Args:
        width, height: in pixels.
        title: its name, for those who cannot see it.
        description: what it shows, in a few sentences.
        shapes: from the lowest to the uppermost.
    """

    width: int
    height: int
    title: str
    description: str
    shapes: Sequence[Shape]


def text_width(words: str, size: float) -> float:
    """Estimate the width of a text in pixels, with the same width for all characters."""
    return 0.58 * size * len(words)
