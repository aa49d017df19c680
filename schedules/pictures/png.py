"""Writes timelines as PNG with Pillow and its built-in font."""

from __future__ import annotations

import io
from collections.abc import Sequence

from .colours import BACKGROUND, FAINT, TEXT
from .layout import FONT, Anchor, Panel, Pen, PictureError, draw_panels

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError:
    raise ImportError("png() needs Pillow: pip install 'pipepart[png]', or take svg()") from None

_FINE = 4  # each pixel is drawn as 4 in a row, so that edges between pixels come out exact


def to_png(panels: Sequence[Panel], width: int, title: str | None, scale: float = 2.0) -> bytes:
    """Return the picture of timelines one below another; arguments and errors as for `Drawn.png`."""
    if not 0.5 <= scale <= 8:
        raise PictureError(f"scale={scale}: give a number of pixels per unit from 0.5 to 8")
    height = draw_panels(_PngPen(1, 1, scale), panels, width, title)
    pen = _PngPen(round(width * scale), round(height * scale), scale)
    draw_panels(pen, panels, width, title)
    data = io.BytesIO()
    pen.image.save(data, "PNG", dpi=(96 * scale, 96 * scale))
    return data.getvalue()


class _PngPen(Pen):
    """Draws on an image of some pixels, ``scale`` of them for each unit."""

    def __init__(self, width: int, height: int, scale: float) -> None:
        self._wide = Image.new("RGB", (width * _FINE, height), BACKGROUND)
        self._pen = ImageDraw.Draw(self._wide)
        self._scale, self._across = scale, scale * _FINE
        self._texts: list[tuple[float, float, str, float, Anchor, str]] = []

    @property
    def image(self) -> Image.Image:
        """What was drawn, with the texts on top."""
        scale = self._scale
        image = self._wide.resize((self._wide.width // _FINE, self._wide.height), Image.Resampling.BOX)
        pen = ImageDraw.Draw(image)
        for x, y, words, size, anchor, colour in self._texts:
            font = ImageFont.load_default(size * scale)
            pen.text((x * scale, y * scale), words, colour, font, "lm" if anchor == "start" else "mm")
        return image

    def box(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> None:
        left, right = round(x * self._across), round((x + width) * self._across) - 1
        top, bottom = round(y * self._scale), round((y + height) * self._scale) - 1
        if right >= left and bottom >= top:
            self._pen.rectangle((left, top, right, bottom), fill)

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        ends = (x1 * self._across, y1 * self._scale, x2 * self._across, y2 * self._scale)
        self._pen.line(ends, FAINT, round(self._across if x1 == x2 else self._scale))

    def text(
        self, x: float, y: float, words: str, size: float = FONT, anchor: Anchor = "start", colour: str = ""
    ) -> None:
        self._texts.append((x, y, words, size, anchor, colour or TEXT))
