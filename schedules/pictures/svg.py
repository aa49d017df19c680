"""Writes a drawing as SVG without ids, so that one page can contain several drawings."""

from __future__ import annotations

from html import escape

from .shapes import Box, Drawing, Line, Shape, Text


def to_svg(drawing: Drawing, transparent: bool = False) -> str:
    """Return the drawing as an SVG document.

    Args:
        drawing: the picture.
        transparent: leave the background out, and draw texts and lines in the colour of the page's text, so that a page
            with the picture in it is readable on light and on dark.
    """
    width, height = drawing.width, drawing.height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{_escaped(drawing.title)}</title>",
            f"<desc>{_escaped(drawing.description)}</desc>",
            *(
                _element(shape, transparent)
                for shape in drawing.shapes
                if not (transparent and isinstance(shape, Box) and shape.role == "background")
            ),
            "</svg>\n",
        ]
    )


def _element(shape: Shape, transparent: bool) -> str:
    if isinstance(shape, Box):
        return _box(shape, transparent)
    if isinstance(shape, Text):
        return _text(shape, transparent)
    if isinstance(shape, Line):
        return _line(shape, transparent)
    corners = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.corners)
    return f'<polygon points="{corners}" fill="{shape.fill}"/>'


def _box(box: Box, transparent: bool) -> str:
    place = f'x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" height="{_number(box.height)}"'
    faint = transparent and box.role == "idle"
    paint = 'fill="currentColor" fill-opacity="0.1"' if faint else f'fill="{box.fill}"'
    if not box.tip:
        return f"<rect {place} {paint}/>"
    return f"<rect {place} {paint}><title>{_escaped(box.tip)}</title></rect>"


def _line(line: Line, transparent: bool) -> str:
    color = "currentColor" if transparent else line.color
    ends = f'x1="{_number(line.x1)}" y1="{_number(line.y1)}" x2="{_number(line.x2)}" y2="{_number(line.y2)}"'
    return f'<line {ends} stroke="{color}"/>'


def _text(text: Text, transparent: bool) -> str:
    color = "currentColor" if transparent and text.role == "text" else text.color
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    # Digits and capitals are about 0.7 of the font high: their middle is 0.35 above the baseline.
    baseline = _number(text.y + 0.35 * text.size)
    return (
        f'<text x="{_number(text.x)}" y="{baseline}" font-size="{_number(text.size)}" '
        f'fill="{color}"{anchor}>{_escaped(text.words)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escaped(words: str) -> str:
    """Escape text for XML, which has no control characters."""
    return escape("".join(sign if sign.isprintable() else " " for sign in words))
