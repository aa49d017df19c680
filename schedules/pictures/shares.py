"""Draws the share of time that a device spends on each kind of action, for actions too short to draw one by one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..core.action import COMMUNICATION, Kind
from .boxes import Row
from .colours import LOOKS
from .shapes import Area, Shape

_NARROWEST = 4.0  # pixels
_ACTIONS = 6  # at least in a column of a device that is busy


def device_shares(row: Row) -> Iterator[Shape]:
    """Yield one stacked area per kind of action; the rest of the row's height is idle time.

    An overlapped pair counts half as its forward and half as its backward.
    """
    spans: dict[Kind, list[tuple[float, float, float]]] = {}
    for action, start, end in zip(row.actions, row.starts, row.ends, strict=True):
        if end > start and action.kind not in COMMUNICATION:
            for leaf in action.leaves:
                spans.setdefault(leaf.kind, []).append((start, end, 1 / len(action.leaves)))
    if not spans or not row.width:
        return
    typical = float(np.median([end - start for each in spans.values() for start, end, _ in each]))
    columns = max(1, round(row.width / max(_NARROWEST, _ACTIONS * typical)))
    edges = np.linspace(0.0, row.width, columns + 1)
    below = np.zeros(columns)
    for kind in LOOKS:
        if kind in spans:
            above = below + _share(spans[kind], edges)
            yield Area(_outline(row, edges, below, above), LOOKS[kind].light)
            below = above


def _share(spans: list[tuple[float, float, float]], edges: np.ndarray) -> np.ndarray:
    """Return which part of the time between two edges is within the spans: 0 to 1, one number a column."""
    starts, ends, weights = map(np.array, zip(*sorted(spans), strict=True))
    passed = np.clip(edges[:, None] - starts, 0.0, ends - starts) @ weights
    return np.clip(np.diff(passed) / np.diff(edges), 0.0, 1.0)


def _outline(row: Row, edges: np.ndarray, below: np.ndarray, above: np.ndarray) -> list[tuple[float, float]]:
    """Return the corners of what lies between two lines of steps; steps of equal height are one."""
    upper, lower = (_steps(row, edges, np.minimum(each, 1.0)) for each in (above, below))
    return upper + lower[::-1]


def _steps(row: Row, edges: np.ndarray, heights: np.ndarray) -> list[tuple[float, float]]:
    levels = np.round(row.y + row.height * (1 - heights), 1)
    first = np.flatnonzero(np.r_[True, levels[1:] != levels[:-1]])
    last = np.r_[first[1:], levels.size]
    return [
        (row.x + float(edges[edge]), float(levels[at]))
        for at, stop in zip(first, last, strict=True)
        for edge in (at, stop)
    ]
