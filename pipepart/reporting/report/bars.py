"""Bars of the report: one a device, made of parts, such as the kinds of action in a step or of bytes in a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_THINNEST = 0.05  # percent of the width; what is smaller has no part in a bar


class Part(NamedTuple):
    """A part of each bar.

    word: in the legend.
    look: its class in page.css.
    values: [bars].
    """

    word: str
    look: str
    values: Sequence[float]


class Piece(NamedTuple):
    """A part of one bar, or a mark across it.

    look: its class in page.css.
    percent: its width; of a mark, its distance from the left.
    tip: what the browser shows under the pointer.
    """

    look: str
    percent: float
    tip: str


class Bars(NamedTuple):
    """Bars with a common scale.

    legend: look and word of each part and mark.
    rows: name, pieces from left to right, and marks of each bar.
    """

    legend: list[tuple[str, str]]
    rows: list[tuple[str, list[Piece], list[Piece]]]


def bars(
    names: Sequence[str],
    parts: Sequence[Part],
    scale: float,
    text: Callable[[float], str],
    marks: Sequence[tuple[str, str, Sequence[float | None]]] = (),
) -> Bars:
    """Lay out bars.

    Args:
        names: [bars].
        parts: from left to right.
        scale: the value of a bar of full width.
        text: formats a value.
        marks: word, look and [bars] values of lines across the bars; None, and what is beyond the scale, has no line.
    """

    def piece(word: str, look: str, name: str, value: float) -> Piece:
        return Piece(look, 100 * value / (scale or 1.0), f"{name}: {word} {text(value)}")

    rows = []
    for at, name in enumerate(names):
        pieces = [piece(part.word, part.look, name, part.values[at]) for part in parts]
        lines = [
            piece(word, look, name, value)
            for word, look, values in marks
            if (value := values[at]) is not None and value <= scale
        ]
        rows.append((name, [each for each in pieces if each.percent > _THINNEST], lines))
    drawn = {each.look for _, pieces, lines in rows for each in (*pieces, *lines)}
    legend = [(look, word) for word, look, _ in (*parts, *marks)]
    return Bars([entry for entry in legend if entry[0] in drawn], rows)
