"""Lays out timelines as a picture: a row per device, a box per action, a time axis and a legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..core.action import COMMUNICATION, Kind
from ..core.schedule import Schedule
from .axis import time_axis, with_unit
from .boxes import Row, device_boxes, label_size
from .colours import BACKGROUND, IDLE, LOOKS, TEXT
from .shapes import Box, Drawing, PictureError, Shape, Text, text_width
from .shares import device_shares

_MARGIN = 8
_FONT = 12
_ROW, _GAP = 24, 4
_LONGEST_LABEL = 28  # characters
_NARROWEST = 200  # pixels
_MOST_ROWS = 256
# The shortest boxes that are drawn one by one: a quarter are shorter.
_SHORTEST_BOX = 3.0


class Panel(NamedTuple):
    """A timeline to draw.

    Args:
        name: stands above it, if there are several.
        schedule: the actions.
        starts, ends: seconds, as in `Timeline`.
        seconds: from the first start to the last end.
        bubble: the idle part of them, mean over the devices.
        labels: the names of the devices; None for "device 0", "device 1", ...
    """

    name: str
    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    seconds: float
    bubble: float
    labels: Sequence[str] | None


def lay_out(panels: Sequence[Panel], width: int, title: str | None) -> Drawing:
    """Return the picture of timelines one below another on a common time axis; see `Timeline.svg`.

    Raises:
        PictureError: the picture is too narrow, there is another number of labels than devices, or too many devices.
        TypeError: `labels` are no sequence of names.
    """
    names = list(map(_row_names, panels))
    if width < _NARROWEST:
        raise PictureError(f"width={width}: a picture has at least {_NARROWEST} pixels")
    longest = max(len(name) for rows in [["time (ms)"], *names] for name in rows)
    left = _MARGIN + text_width("0" * longest, _FONT) + _MARGIN
    seconds = max(panel.seconds for panel in panels)
    scale = (width - left - _MARGIN) / (seconds or 1.0)
    shapes: list[Shape] = []
    y = float(_MARGIN)
    if title:
        shapes.append(Text(_MARGIN, y + 9, title, _FONT + 2, TEXT))
        y += 26
    folded = any(_short(panel) * scale < _SHORTEST_BOX for panel in panels)
    for panel, rows in zip(panels, names, strict=True):
        if len(panels) > 1:
            shapes.append(Text(_MARGIN, y + 7, f"{panel.name}: {_figures(panel)}", _FONT, TEXT))
            y += 20
        shapes += _rows(panel, rows, left, y, scale, folded)
        y += panel.schedule.devices * (_ROW + _GAP) + (_GAP if len(panels) > 1 else 0)
    shapes += time_axis(seconds, left, y, scale)
    y += 28
    legend, y = _legend(panels, width, y, folded)
    return Drawing(
        width=width,
        height=round(y + _MARGIN),
        title=title or _sentence(panels[0]),
        description=_description(panels),
        shapes=[Box(0, 0, width, round(y + _MARGIN), BACKGROUND, role="background"), *shapes, *legend],
    )


def _row_names(panel: Panel) -> list[str]:
    devices, labels = panel.schedule.devices, panel.labels
    if devices > _MOST_ROWS:
        raise PictureError(
            f"a picture has room for {_MOST_ROWS} devices and {panel.schedule.name} has {devices}: "
            "draw one replica, or fewer devices"
        )
    if labels is None:
        return [f"device {device}" for device in range(devices)]
    if isinstance(labels, (str, bool)) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels={labels!r}: give a list with the name of each of the {devices} devices")
    if len(labels) != devices:
        raise PictureError(f"{len(labels)} labels for {devices} devices: give one for each")
    return [label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…" for label in labels]


def _rows(
    panel: Panel, names: Sequence[str], left: float, top: float, scale: float, folded: bool
) -> Iterator[Shape]:
    schedule = panel.schedule
    begin = min(map(min, filter(None, panel.starts)), default=0.0)
    size = label_size(schedule, panel.starts, panel.ends, scale)
    for device, name in enumerate(names):
        row = Row(
            x=left,
            y=top + device * (_ROW + _GAP),
            height=_ROW,
            width=panel.seconds * scale,
            actions=schedule.actions[device],
            starts=[(start - begin) * scale for start in panel.starts[device]],
            ends=[(end - begin) * scale for end in panel.ends[device]],
            chunk_of={stage: number for number, stage in enumerate(schedule.stages_of(device))},
        )
        yield Text(_MARGIN, row.y + _ROW / 2, name, _FONT, TEXT)
        yield Box(row.x, row.y, row.width, row.height, IDLE, role="idle")
        yield from device_shares(row) if folded else device_boxes(row, size, 1 / scale)


def _short(panel: Panel) -> float:
    """Return the seconds of a short action: three quarters of those that take time are longer."""
    lengths = [
        end - start
        for row in zip(panel.schedule.actions, panel.starts, panel.ends, strict=True)
        for action, start, end in zip(*row, strict=True)
        if end > start and action.kind not in COMMUNICATION
    ]
    return float(np.quantile(lengths, 0.25)) if lengths else float("inf")


def _legend(panels: Sequence[Panel], width: int, top: float, folded: bool) -> tuple[list[Shape], float]:
    """Return the legend, on as many lines as it needs, and where it ends."""
    used = set().union(*map(_kinds, panels))
    chunked = not folded and any(dark for _, dark in used)
    entries = []
    for kind, look in LOOKS.items():
        fills = [
            (look.light, (kind, False) in used or folded),
            (look.dark, (kind, True) in used and not folded),
        ]
        if (kind, False) in used or (kind, True) in used:
            entries.append(([fill for fill, shown in fills if shown], look.word))
    entries.append(([IDLE], "idle"))
    if chunked:
        entries.append(([], "dark: every second stage of a device"))
    if folded:
        entries.append(([], "height: share of the time"))
    shapes: list[Shape] = []
    x, y = float(_MARGIN), top
    for fills, word in entries:
        length = 14 * len(fills) + 4 + text_width(word, _FONT) + 14
        if x > _MARGIN and x + length > width:
            x, y = float(_MARGIN), y + 20
        for number, fill in enumerate(fills):
            shapes.append(Box(x + 14 * number, y, 12, 12, fill, role="idle" if fill == IDLE else "action"))
        shapes.append(Text(x + 14 * len(fills) + 4, y + 6, word, _FONT, TEXT))
        x += length
    return shapes, y + 14


def _kinds(panel: Panel) -> set[tuple[Kind, bool]]:
    """Return the kinds of actions of a timeline, each with whether its boxes are dark."""
    chunk_of = {
        stage: number
        for device in range(panel.schedule.devices)
        for number, stage in enumerate(panel.schedule.stages_of(device))
    }
    return {
        (leaf.kind, chunk_of[leaf.stage] % 2 == 1)
        for row in panel.schedule.actions
        for action in row
        for leaf in action.leaves
        if leaf.kind in LOOKS
    }


def _description(panels: Sequence[Panel]) -> str:
    several = len(panels) > 1
    return " ".join(f"{panel.name}: {_sentence(panel)}" if several else _sentence(panel) for panel in panels)


def _sentence(panel: Panel) -> str:
    schedule = panel.schedule
    micro_batches = f"{schedule.micro_batches} micro-batch{'es' if schedule.micro_batches != 1 else ''}"
    devices = f"{schedule.devices} device{'s' if schedule.devices != 1 else ''}"
    return f"{schedule.name} on {devices} with {micro_batches}: {_figures(panel)}."


def _figures(panel: Panel) -> str:
    return f"a step of {with_unit(panel.seconds)}, {panel.bubble:.0%} idle"
