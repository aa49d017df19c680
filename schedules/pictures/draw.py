"""Draws timelines as SVG or PNG, and optionally writes the file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from .layout import Panel, lay_out
from .svg import to_svg

__all__ = ["Drawn", "Panel", "picture_png", "picture_svg"]


class Drawn(ABC):
    """Base class of objects with a picture: timelines one below another on a common time axis."""

    @abstractmethod
    def panels(self, labels: Sequence[str] | None = None) -> list[Panel]:
        """Return the timelines to draw. ``labels``: names of the devices."""

    def svg(
        self,
        path: str | Path | None = None,
        *,
        width: int = 900,
        labels: Sequence[str] | None = None,
        title: str | None = None,
        transparent: bool = False,
    ) -> str:
        """Return an SVG picture, to scale: one row per device, one box per action.

        A trace shows its median step above the predicted one. The number in a box is its micro-batch, its colour what
        it does; boxes of a device's second, fourth, ... stage are dark. Idle time stays grey. Where single actions
        would be narrower than 3 pixels, a row shows what part of the time each kind takes.

        Args:
            path: a file to write as well.
            width: pixels.
            labels: the names of the devices; if not given, those of the plan, or "device 0", "device 1", ...
            title: a line above the picture.
            transparent: leave the background out and write in the colour of the page around, for a page that is read in
                light and in dark.

        Raises:
            ValueError: the picture is too narrow, has more than 256 devices, or another number of labels than devices;
                or a trace has no step.
            OSError: the file cannot be written.
        """
        return picture_svg(self.panels(labels), path, width, title, transparent)

    def png(
        self,
        path: str | Path | None = None,
        *,
        width: int = 900,
        labels: Sequence[str] | None = None,
        title: str | None = None,
        scale: float = 2.0,
    ) -> bytes:
        """Return the same picture as PNG, of ``scale * width`` pixels. Needs Pillow: ``pip install pipepart[png]``.

        Raises:
            ValueError, OSError: as for `svg`.
            ImportError: Pillow is not installed.
        """
        return picture_png(self.panels(labels), path, width, title, scale)


def picture_svg(
    panels: Sequence[Panel],
    path: str | Path | None,
    width: int,
    title: str | None,
    transparent: bool,
) -> str:
    """Return timelines one below another as SVG; arguments as for `Drawn.svg`."""
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
    """Return timelines one below another as PNG; arguments as for `Drawn.png`."""
    from .png import to_png  # Pillow, which is an optional extra

    data = to_png(lay_out(panels, width, title), scale)
    if path is not None:
        Path(path).write_bytes(data)
    return data
