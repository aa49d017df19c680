"""Writes a drawing as PNG with Pillow and its built-in font."""

from __future__ import annotations

import io
from functools import cache

from .shapes import Area, Box, Drawing, Line, PictureError, Text

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError:
    raise ImportError("png() needs Pillow: pip install 'pipepart[png]', or take svg()") from None

_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}
_FINE = 4  # each pixel is drawn as 4 in a row, so that edges between pixels come out exact


def to_png(drawing: Drawing, scale: float) -> bytes:
    """Return the drawing as a PNG file of ``scale`` pixels per unit.

    Raises:
        PictureError: ``scale`` is not between 0.5 and 8.
    """
    if not 0.5 <= scale <= 8:
        raise PictureError(f"scale={scale}: give a number of pixels per unit from 0.5 to 8")
    width, height = round(drawing.width * scale), round(drawing.height * scale)
    wide = Image.new("RGB", (width * _FINE, height), "white")
    pen = ImageDraw.Draw(wide)
    for shape in drawing.shapes:
        _fill(pen, shape, scale)
    image = wide.resize((width, height), Image.Resampling.BOX)
    pen = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        if isinstance(shape, Text):
            font = _font(shape.size * scale)
            place = (shape.x * scale, shape.y * scale)
            pen.text(place, shape.words, shape.color, font, _ANCHORS[shape.anchor])
    data = io.BytesIO()
    image.save(data, "PNG", dpi=(96 * scale, 96 * scale))
    return data.getvalue()


def _fill(pen: ImageDraw.ImageDraw, shape: object, scale: float) -> None:
    across = scale * _FINE
    if isinstance(shape, Box):
        right, bottom = (shape.x + shape.width) * across, (shape.y + shape.height) * scale
        box = (round(shape.x * across), round(shape.y * scale), round(right) - 1, round(bottom) - 1)
        if box[2] >= box[0] and box[3] >= box[1]:
            pen.rectangle(box, shape.fill)
    elif isinstance(shape, Line):
        ends = (shape.x1 * across, shape.y1 * scale, shape.x2 * across, shape.y2 * scale)
        pen.line(ends, shape.color, round(_FINE * scale) if shape.x1 == shape.x2 else round(scale))
    elif isinstance(shape, Area):
        pen.polygon([(x * across, y * scale) for x, y in shape.corners], shape.fill)


@cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
