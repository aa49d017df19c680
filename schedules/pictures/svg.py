"""Draws timelines as SVG: a row per device, a box per action, a time axis and a legend.

The text has no ids, so that one page can contain several pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import Literal, NamedTuple

from ..core.timed_schedule import TimedSchedule
from .colours import BACKGROUND, FAINT, IDLE, LOOKS, TEXT, fill_of

_MARGIN = 8
_FONT = 12
_FONTS_IN_BOXES = (12.0, 11.0, 10.0, 9.0, 8.0, 7.0)
_ROW, _GAP = 24, 4
_LONGEST_LABEL = 28  # characters
_NARROWEST = 200  # pixels
_MOST_ROWS, _MOST_ACTIONS = 256, 20_000
_BETWEEN_TICKS = 60  # pixels, at least
_Anchor = Literal["start", "middle"]
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


class PictureError(ValueError):
    """The picture cannot be drawn with these arguments; the message says what to change."""


class Panel(NamedTuple):
    """A timeline to draw.

    Args:
        name: stands above it, if there are several.
        timeline: the actions and their times.
        labels: the names of the devices; None for "device 0", "device 1", ...
    """

    name: str
    timeline: TimedSchedule
    labels: Sequence[str] | None = None


def to_svg(panels: Sequence[Panel], width: int, title: str | None, transparent: bool = False) -> str:
    """Return the picture of timelines one below another; arguments and errors as for `Drawn.svg`."""
    pen = _Pen(transparent)
    height = _draw_panels(pen, panels, width, title)
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


class _Pen:
    """Writes the elements of a picture, from the lowest to the uppermost. Places are in pixels; y grows downwards.

    A transparent picture takes the colour of texts, lines and idle time from its page.
    """

    def __init__(self, transparent: bool) -> None:
        self.elements: list[str] = []
        self._transparent = transparent

    def box(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> None:
        """Draw a rectangle; ``tip`` is what a viewer shows under the pointer."""
        faint = self._transparent and fill == IDLE
        paint = 'fill="currentColor" fill-opacity="0.1"' if faint else f'fill="{fill}"'
        rect = f"<rect {_place(x=x, y=y, width=width, height=height)} {paint}"
        self.elements.append(f"{rect}><title>{_escaped(tip)}</title></rect>" if tip else f"{rect}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        stroke = "currentColor" if self._transparent else FAINT
        self.elements.append(f'<line {_place(x1=x1, y1=y1, x2=x2, y2=y2)} stroke="{stroke}"/>')

    def text(
        self, x: float, y: float, words: str, size: float = _FONT, anchor: _Anchor = "start", colour: str = ""
    ) -> None:
        """Draw a text whose middle is at y, and whose start or middle is at x; by default in the colour of the page."""
        colour = colour or ("currentColor" if self._transparent else TEXT)
        anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
        # Digits and capitals are about 0.7 of the font high: their middle is 0.35 above the baseline.
        place = f'{_place(x=x, y=y + 0.35 * size)} font-size="{_number(size)}"'
        self.elements.append(f'<text {place} fill="{colour}"{anchored}>{_escaped(words)}</text>')


def _draw_panels(pen: _Pen, panels: Sequence[Panel], width: int, title: str | None) -> int:
    """Draw timelines one below another on a common time axis, and return the height of the picture.

    Raises:
        PictureError: the picture is too narrow, there is another number of labels than devices, or there are too many
            devices or actions.
        TypeError: `labels` are no sequence of names.
    """
    names = list(map(_row_names, panels))
    if width < _NARROWEST:
        raise PictureError(f"width={width}: a picture has at least {_NARROWEST} pixels")
    longest = max(len(name) for rows in [["time (ms)"], *names] for name in rows)
    left = 2 * _MARGIN + _text_width("0" * longest, _FONT)
    seconds = max(panel.timeline.makespan for panel in panels)
    scale = (width - left - _MARGIN) / (seconds or 1.0)
    y = float(_MARGIN)
    if title:
        pen.text(_MARGIN, y + 9, title, _FONT + 2)
        y += 26
    for panel, rows in zip(panels, names, strict=True):
        if len(panels) > 1:
            pen.text(_MARGIN, y + 7, f"{panel.name}: {figures(panel.timeline)}")
            y += 20
        for device, name in enumerate(rows):
            pen.text(_MARGIN, y + _ROW / 2, name)
            pen.box(left, y, panel.timeline.makespan * scale, _ROW, IDLE)
            _draw_boxes(pen, panel.timeline, device, left, y, scale)
            y += _ROW + _GAP
        y += _GAP if len(panels) > 1 else 0
    _draw_time_axis(pen, seconds, left, y, scale)
    return round(_draw_legend(pen, panels, width, y + 28) + _MARGIN)


def figures(timeline: TimedSchedule) -> str:
    """Return the seconds and the bubble of a step as text."""
    return f"a step of {with_unit(timeline.makespan)}, {timeline.bubble:.0%} idle"


def with_unit(seconds: float) -> str:
    """Format seconds with three digits and a unit.

    >>> with_unit(0.01234), with_unit(33.0)
    ('12.3 ms', '33 s')
    """
    unit, name = _unit(seconds)
    return f"{seconds / unit:.3g} {name}"


def _draw_boxes(
    pen: _Pen, timeline: TimedSchedule, device: int, left: float, top: float, scale: float
) -> None:
    """Draw a box for each action of a device that takes time, with its micro-batch where there is room."""
    chunk_of = {stage: number for number, stage in enumerate(timeline.schedule.stages_of(device))}
    longest = str(timeline.schedule.micro_batches - 1)
    room = timeline.short_action * scale - 2
    font = next((size for size in _FONTS_IN_BOXES if _text_width(longest, size) <= room), _FONTS_IN_BOXES[-1])
    for action, start, end in timeline.row(device):
        if end <= start:
            continue
        fill, ink = fill_of(action.kind, chunk_of[action.stage])
        begin = start - timeline.origin
        x, length = left + begin * scale, (end - start) * scale
        gap = min(1.0, 0.15 * length)  # in place of an outline: it looks alike on light and on dark pages
        pen.box(
            x, top, length - gap, _ROW, fill, f"{action}: {with_unit(end - start)}, from {with_unit(begin)}"
        )
        label = "" if action.micro_batch is None else str(action.micro_batch)
        if label and _text_width(label, font) + gap <= length:
            pen.text(x + (length - gap) / 2, top + _ROW / 2, label, font, "middle", ink)


def _row_names(panel: Panel) -> list[str]:
    schedule, labels = panel.timeline.schedule, panel.labels
    actions = sum(map(len, schedule.actions))
    if schedule.devices > _MOST_ROWS or actions > _MOST_ACTIONS:
        raise PictureError(
            f"a picture has room for {_MOST_ROWS} devices and {_MOST_ACTIONS:,} actions, and {schedule.name} has "
            f"{schedule.devices} and {actions:,}: draw one replica or fewer micro-batches, or save a trace"
        )
    if labels is None:
        return [f"device {device}" for device in range(schedule.devices)]
    if isinstance(labels, (str, bool)) or not all(isinstance(label, str) for label in labels):
        raise TypeError(
            f"labels={labels!r}: give a list with the name of each of the {schedule.devices} devices"
        )
    if len(labels) != schedule.devices:
        raise PictureError(f"{len(labels)} labels for {schedule.devices} devices: give one for each")
    return [label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…" for label in labels]


def _draw_time_axis(pen: _Pen, seconds: float, left: float, y: float, scale: float) -> None:
    """Draw the axis, with a tick and its number at each round time."""
    unit, name = _unit(seconds)
    pen.text(_MARGIN, y + 14, f"time ({name})", _FONT - 1)
    pen.line(left, y + 2, left + seconds * scale, y + 2)
    step = _round_step(_BETWEEN_TICKS / scale / unit) if seconds else 1.0
    for number in range(floor(seconds / unit / step + 1e-9) + 1):
        x = left + number * step * unit * scale
        pen.line(x, y + 2, x, y + 6)
        pen.text(x, y + 14, f"{number * step:g}", _FONT - 1, "middle" if number else "start")


def _unit(seconds: float) -> tuple[float, str]:
    return next((each for each in _UNITS if seconds >= each[0]), _UNITS[0])


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... (and 0.5, 0.2, 0.1, ...) that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def _draw_legend(pen: _Pen, panels: Sequence[Panel], width: int, top: float) -> float:
    """Draw the legend, on as many lines as it needs, and return where it ends."""
    used = {
        (action.kind, schedule.stages_of(device).index(action.stage) % 2)
        for schedule in (panel.timeline.schedule for panel in panels)
        for device, row in enumerate(schedule.actions)
        for action in row
    }
    entries = [
        ([fill_of(kind, chunk)[0] for chunk in (0, 1) if (kind, chunk) in used], look.word)
        for kind, look in LOOKS.items()
        if {(kind, 0), (kind, 1)} & used
    ]
    entries.append(([IDLE], "idle"))
    if any(dark for _, dark in used):
        entries.append(([], "dark: every second stage of a device"))
    x, y = float(_MARGIN), top
    for fills, word in entries:
        length = 14 * len(fills) + 4 + _text_width(word, _FONT) + 14
        if x > _MARGIN and x + length > width:
            x, y = float(_MARGIN), y + 20
        for number, fill in enumerate(fills):
            pen.box(x + 14 * number, y, 12, 12, fill)
        pen.text(x + 14 * len(fills) + 4, y + 6, word)
        x += length
    return y + 14


def _text_width(words: str, size: float) -> float:
    """Estimate the width of a text in pixels, with the same width for all characters."""
    return 0.58 * size * len(words)


def _sentence(timeline: TimedSchedule) -> str:
    return f"{timeline.schedule.name}, {timeline.schedule.sizes}: {figures(timeline)}."


def _place(**numbers: float) -> str:
    return " ".join(f'{name}="{_number(value)}"' for name, value in numbers.items())


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escaped(words: str) -> str:
    """Escape text for XML, which has no control characters."""
    return escape("".join(sign if sign.isprintable() else " " for sign in words))
