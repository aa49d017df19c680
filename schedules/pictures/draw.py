"""Drawn: the base class of what has a picture, as SVG or in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .svg import Panel, PictureError, figures, to_svg

_NOTEBOOK_WIDTH = 860  # pixels


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
        it does; boxes of a device's second, fourth, ... stage are dark. Idle time stays grey.

        Args:
            path: a file to write as well.
            width: pixels.
            labels: the names of the devices; if not given, those of the plan, or "device 0", "device 1", ...
            title: a line above the picture.
            transparent: leave the background out and write in the colour of the page around, for a page that is read in
                light and in dark.

        Raises:
            ValueError: the picture is too narrow, has more than 256 devices or 20,000 actions, or another number of
                labels than devices; or a trace has no step.
            OSError: the file cannot be written.
        """
        text = to_svg(self.panels(labels), width, title, transparent)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        """Show the timeline in a notebook."""
        return panels_html(self.panels())


def panels_html(panels: Sequence[Panel]) -> str:
    """Return timelines one below another on a common axis, as HTML without scripts or style sheets.

    A timeline that is too large for a picture is a line of figures.
    """
    try:
        picture = to_svg(panels, _NOTEBOOK_WIDTH, None, transparent=True)
    except PictureError as error:
        picture = f"<p>{escape(str(error))}</p>"
    first = panels[0].timeline
    # Several panels have their figures in the picture.
    head = f"{first.schedule.name}, {first.schedule.sizes}: {figures(first)}" if len(panels) == 1 else ""
    return f'<div style="overflow-x:auto"><p style="margin:2px 0"><b>{escape(head)}</b></p>{picture}</div>'
