"""Draws each action of a device as a box with the number of its micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.action import COMMUNICATION, Action
from ..core.schedule import Schedule
from .axis import with_unit
from .colours import fill_of
from .shapes import Box, Shape, Text, text_width

_SIZES = (12.0, 11.0, 10.0, 9.0, 8.0, 7.0)


@dataclass(frozen=True)
class Row:
    """Position of the row of a device in the picture, in pixels.

    Args:
        x, y, width, height: of the row.
        actions: of the device, in order.
        starts, ends: of each action, from the left of the row.
        chunk_of: which of the device's stages a stage is: 0, 1, ...
    """

    x: float
    y: float
    width: float
    height: float
    actions: Sequence[Action]
    starts: Sequence[float]
    ends: Sequence[float]
    chunk_of: Mapping[int, int]


def device_boxes(row: Row, size: float, second: float) -> Iterator[Shape]:
    """Yield a box for each action that takes time; an overlapped pair shares one, the forward above the backward.

    Args:
        row: the device.
        size: of the font of the numbers; 0 for none.
        second: seconds of a pixel.
    """
    for action, start, end in zip(row.actions, row.starts, row.ends, strict=True):
        if end <= start or action.kind in COMMUNICATION:
            continue
        tip = f"{action}: {with_unit((end - start) * second)}, from {with_unit(start * second)}"
        height = row.height / len(action.leaves)
        for number, leaf in enumerate(action.leaves):
            fill, ink = fill_of(leaf.kind, row.chunk_of[leaf.stage])
            top = row.y + number * height
            # A gap between boxes, in place of an outline, looks alike on light and on dark pages.
            gap = min(1.0, 0.15 * (end - start))
            yield Box(row.x + start, top, end - start - gap, height, fill, tip)
            label = "" if leaf.micro_batch is None or not size else str(leaf.micro_batch)
            font = min(size, height - 3)
            if label and text_width(label, font) + gap <= end - start:
                yield Text(
                    row.x + (start + end - gap) / 2, top + height / 2, label, font, ink, "middle", "label"
                )


def label_size(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]], scale: float
) -> float:
    """Return the largest font size at which the numbers fit into 90 % of the boxes; 0 if no size does."""
    room = [
        (end - start) * scale - 2
        for row in zip(schedule.actions, starts, ends, strict=True)
        for action, start, end in zip(*row, strict=True)
        if end > start and action.kind not in COMMUNICATION
    ]
    longest = str(schedule.micro_batches - 1)
    narrow = float(np.quantile(room, 0.1)) if room else 0.0
    return next((size for size in _SIZES if text_width(longest, size) <= narrow), 0.0)
