"""Draws timelines as SVG or PNG, and writes the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .layout import Panel, lay_out
from .svg import to_svg

__all__ = ["Panel", "picture_png", "picture_svg"]


def picture_svg(
    panels: Sequence[Panel],
    path: str | Path | None,
    width: int,
    title: str | None,
    transparent: bool,
) -> str:
    """Return timelines under each other as SVG; `Timeline.svg` says what the arguments are."""
    text = to_svg(lay_out(panels, width, title), transparent)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def picture_png(
    panels: Sequence[Panel],
    path: str | Path | None,
    width: int,
    title: str | None,
    scale: float,
) -> bytes:
    """Return timelines under each other as PNG; `Timeline.png` says what the arguments are."""
    from .png import to_png  # Pillow, which is an optional extra

    data = to_png(lay_out(panels, width, title), scale)
    if path is not None:
        Path(path).write_bytes(data)
    return data
