"""Writes a drawing as SVG: the same text for the same drawing, without ids, so that a page may hold many."""

from __future__ import annotations

from html import escape

from .shapes import Area, Box, Drawing, Line, Shape, Text


def to_svg(drawing: Drawing) -> str:
    """Return the drawing as an SVG document.

    Background, idle rows, lines and texts have the classes ``background``, ``idle``, ``line`` and ``text``. Their
    colours are attributes, which the style sheet of a page overrides, for example on a dark page.
    """
    width, height = drawing.width, drawing.height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{_escaped(drawing.title)}</title>",
            f"<desc>{_escaped(drawing.description)}</desc>",
            *map(_element, drawing.shapes),
            "</svg>\n",
        ]
    )


def _element(shape: Shape) -> str:
    if isinstance(shape, Box):
        return _box(shape)
    if isinstance(shape, Text):
        return _text(shape)
    if isinstance(shape, Line):
        ends = f'x1="{_number(shape.x1)}" y1="{_number(shape.y1)}" x2="{_number(shape.x2)}" y2="{_number(shape.y2)}"'
        return f'<line class="line" {ends} stroke="{shape.color}"/>'
    return _area(shape)


def _box(box: Box) -> str:
    place = f'x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" height="{_number(box.height)}"'
    role = "" if box.role == "action" else f'class="{box.role}" '
    start = f'<rect {role}{place} fill="{box.fill}"'
    return f"{start}><title>{_escaped(box.tip)}</title></rect>" if box.tip else f"{start}/>"


def _text(text: Text) -> str:
    role = "" if text.role == "label" else f'class="{text.role}" '
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    # Digits and capitals are about 0.7 of the font high: their middle is 0.35 above the baseline.
    baseline = _number(text.y + 0.35 * text.size)
    return (
        f'<text {role}x="{_number(text.x)}" y="{baseline}" font-size="{_number(text.size)}" '
        f'fill="{text.color}"{anchor}>{_escaped(text.words)}</text>'
    )


def _area(area: Area) -> str:
    corners = " ".join(f"{_number(x)},{_number(y)}" for x, y in area.corners)
    return f'<polygon points="{corners}" fill="{area.fill}"/>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escaped(words: str) -> str:
    """Escape text for XML, which has no control characters."""
    return escape("".join(sign if sign.isprintable() else " " for sign in words))
