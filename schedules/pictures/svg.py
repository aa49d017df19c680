"""Draws timelines as SVG: a row per device, a box per action, a time axis and a legend.

The text has no ids, so that one page can contain several pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

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
    """Return the picture of timelines one below another on a common time axis; see `Drawn.svg`.

    Raises:
        PictureError: the picture is too narrow, there is another number of labels than devices, or there are too many
            devices or actions.
        TypeError: `labels` are no sequence of names.
    """
    names = list(map(_row_names, panels))
    if width < _NARROWEST:
        raise PictureError(f"width={width}: a picture has at least {_NARROWEST} pixels")
    pen = _Pen(transparent)
    longest = max(len(name) for rows in [["time (ms)"], *names] for name in rows)
    left = 2 * _MARGIN + _text_width("0" * longest, _FONT)
    seconds = max(panel.timeline.makespan for panel in panels)
    scale = (width - left - _MARGIN) / (seconds or 1.0)
    shapes: list[str] = []
    y = float(_MARGIN)
    if title:
        shapes.append(pen.text(_MARGIN, y + 9, title, _FONT + 2))
        y += 26
    for panel, rows in zip(panels, names, strict=True):
        if len(panels) > 1:
            shapes.append(pen.text(_MARGIN, y + 7, f"{panel.name}: {figures(panel.timeline)}"))
            y += 20
        for device, name in enumerate(rows):
            shapes.append(pen.text(_MARGIN, y + _ROW / 2, name))
            shapes.append(pen.idle(left, y, panel.timeline.makespan * scale, _ROW))
            shapes += _boxes(pen, panel.timeline, device, left, y, scale)
            y += _ROW + _GAP
        y += _GAP if len(panels) > 1 else 0
    shapes += _time_axis(pen, seconds, left, y, scale)
    legend, y = _legend(pen, panels, width, y + 28)
    height = round(y + _MARGIN)
    background = [] if transparent else [pen.box(0, 0, width, height, BACKGROUND)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{_escaped(title or _sentence(panels[0].timeline))}</title>",
        f"<desc>{_escaped(_description(panels))}</desc>",
    )
    return "\n".join([*head, *background, *shapes, *legend, "</svg>\n"])


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


class _Pen:
    """Writes elements of SVG; a transparent picture takes the colour of texts, lines and idle time from its page."""

    def __init__(self, transparent: bool) -> None:
        self.transparent = transparent

    def box(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
        rect = f'<rect {_place(x=x, y=y, width=width, height=height)} fill="{fill}"'
        return f"{rect}><title>{_escaped(tip)}</title></rect>" if tip else f"{rect}/>"

    def idle(self, x: float, y: float, width: float, height: float) -> str:
        return self.box(x, y, width, height, 'currentColor" fill-opacity="0.1' if self.transparent else IDLE)

    def line(self, x1: float, y1: float, x2: float, y2: float) -> str:
        return f'<line {_place(x1=x1, y1=y1, x2=x2, y2=y2)} stroke="{self._page_colour(FAINT)}"/>'

    def text(self, x: float, y: float, words: str, size: float = _FONT, anchor: str = "") -> str:
        """Return a text on the background, whose middle is at `y`."""
        return self.label(x, y, words, size, self._page_colour(TEXT), anchor)

    def label(self, x: float, y: float, words: str, size: float, colour: str, anchor: str = "middle") -> str:
        # Digits and capitals are about 0.7 of the font high: their middle is 0.35 above the baseline.
        place = f'{_place(x=x, y=y + 0.35 * size)} font-size="{_number(size)}"'
        anchored = f' text-anchor="{anchor}"' if anchor else ""
        return f'<text {place} fill="{colour}"{anchored}>{_escaped(words)}</text>'

    def _page_colour(self, colour: str) -> str:
        return "currentColor" if self.transparent else colour


def _boxes(
    pen: _Pen, timeline: TimedSchedule, device: int, left: float, top: float, scale: float
) -> Iterator[str]:
    """Yield a box for each action of a device that takes time, with its micro-batch where there is room."""
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
        yield pen.box(
            x, top, length - gap, _ROW, fill, f"{action}: {with_unit(end - start)}, from {with_unit(begin)}"
        )
        label = "" if action.micro_batch is None else str(action.micro_batch)
        if label and _text_width(label, font) + gap <= length:
            yield pen.label(x + (length - gap) / 2, top + _ROW / 2, label, font, ink)


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


def _time_axis(pen: _Pen, seconds: float, left: float, y: float, scale: float) -> Iterator[str]:
    """Yield the axis, with a tick and its number at each round time."""
    unit, name = _unit(seconds)
    yield pen.text(_MARGIN, y + 14, f"time ({name})", _FONT - 1)
    yield pen.line(left, y + 2, left + seconds * scale, y + 2)
    step = _round_step(_BETWEEN_TICKS / scale / unit) if seconds else 1.0
    for number in range(floor(seconds / unit / step + 1e-9) + 1):
        x = left + number * step * unit * scale
        yield pen.line(x, y + 2, x, y + 6)
        yield pen.text(x, y + 14, f"{number * step:g}", _FONT - 1, "middle" if number else "start")


def _unit(seconds: float) -> tuple[float, str]:
    return next((each for each in _UNITS if seconds >= each[0]), _UNITS[0])


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... (and 0.5, 0.2, 0.1, ...) that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def _legend(pen: _Pen, panels: Sequence[Panel], width: int, top: float) -> tuple[list[str], float]:
    """Return the legend, on as many lines as it needs, and where it ends."""
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
    shapes: list[str] = []
    x, y = float(_MARGIN), top
    for fills, word in entries:
        length = 14 * len(fills) + 4 + _text_width(word, _FONT) + 14
        if x > _MARGIN and x + length > width:
            x, y = float(_MARGIN), y + 20
        for number, fill in enumerate(fills):
            left = x + 14 * number
            shapes.append(pen.idle(left, y, 12, 12) if fill == IDLE else pen.box(left, y, 12, 12, fill))
        shapes.append(pen.text(x + 14 * len(fills) + 4, y + 6, word))
        x += length
    return shapes, y + 14


def _description(panels: Sequence[Panel]) -> str:
    several = len(panels) > 1
    return " ".join(
        f"{panel.name}: {_sentence(panel.timeline)}" if several else _sentence(panel.timeline)
        for panel in panels
    )


def _sentence(timeline: TimedSchedule) -> str:
    return f"{timeline.schedule.name}, {timeline.schedule.sizes}: {figures(timeline)}."


def _text_width(words: str, size: float) -> float:
    """Estimate the width of a text in pixels, with the same width for all characters."""
    return 0.58 * size * len(words)


def _place(**numbers: float) -> str:
    return " ".join(f'{name}="{_number(value)}"' for name, value in numbers.items())


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escaped(words: str) -> str:
    """Escape text for XML, which has no control characters."""
    return escape("".join(sign if sign.isprintable() else " " for sign in words))
