"""Writes timelines as SVG without ids, so that one page can contain several pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..core.timed_schedule import TimedSchedule
from .colours import BACKGROUND, FAINT, IDLE, TEXT
from .layout import FONT, Anchor, Panel, Pen, draw_panels, figures


def to_svg(panels: Sequence[Panel], width: int, title: str | None, transparent: bool = False) -> str:
    """Return the picture of timelines one below another; arguments and errors as for `Drawn.svg`."""
    pen = _SvgPen(transparent)
    height = draw_panels(pen, panels, width, title)
    sentences = [_sentence(panel.timeline) for panel in panels]
    named = [f"{panel.name}: {sentence}" for panel, sentence in zip(panels, sentences, strict=True)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{_escaped(title or sentences[0])}</title>",
        f"<desc>{_escaped(' '.join(named if len(panels) > 1 else sentences))}</desc>",
    )
    background = "" if transparent else f'<rect width="{width}" height="{height}" fill="{BACKGROUND}"/>'
    return "\n".join([*head, background, *pen.elements, "</svg>\n"])


class _SvgPen(Pen):
    """Writes elements; a transparent picture takes the colour of texts, lines and idle time from its page."""

    def __init__(self, transparent: bool) -> None:
        self.elements: list[str] = []
        self._transparent = transparent

    def box(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> None:
        faint = self._transparent and fill == IDLE
        paint = 'fill="currentColor" fill-opacity="0.1"' if faint else f'fill="{fill}"'
        rect = f"<rect {_place(x=x, y=y, width=width, height=height)} {paint}"
        self.elements.append(f"{rect}><title>{_escaped(tip)}</title></rect>" if tip else f"{rect}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        stroke = "currentColor" if self._transparent else FAINT
        self.elements.append(f'<line {_place(x1=x1, y1=y1, x2=x2, y2=y2)} stroke="{stroke}"/>')

    def text(
        self, x: float, y: float, words: str, size: float = FONT, anchor: Anchor = "start", colour: str = ""
    ) -> None:
        colour = colour or ("currentColor" if self._transparent else TEXT)
        anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
        # Digits and capitals are about 0.7 of the font high: their middle is 0.35 above the baseline.
        place = f'{_place(x=x, y=y + 0.35 * size)} font-size="{_number(size)}"'
        self.elements.append(f'<text {place} fill="{colour}"{anchored}>{_escaped(words)}</text>')


def _sentence(timeline: TimedSchedule) -> str:
    return f"{timeline.schedule.name}, {timeline.schedule.sizes}: {figures(timeline)}."


def _place(**numbers: float) -> str:
    return " ".join(f'{name}="{_number(value)}"' for name, value in numbers.items())


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escaped(words: str) -> str:
    """Escape text for XML, which has no control characters."""
    return escape("".join(sign if sign.isprintable() else " " for sign in words))
