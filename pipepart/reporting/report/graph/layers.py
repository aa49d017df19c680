"""Places the boxes and edges of the layer graph: one column for each stage, layers from top to bottom.

::

    stage 0      stage 1                 Within a column a layer is one row below the last layer that it uses; layers of
    ┌─────┐      ┌─────┐                 one row, the branches, stand side by side. A column that is too long goes on in
    │  a  │      │  d  │                 another one beside it. Edges that leave a column are those that are cut.
    └──┬──┘   ┌─▶└──┬──┘
    ┌──┴──┐   │  ┌──┴──┐
    │  b  ├───┘  │  e  │
    └─────┘      └─────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from .nodes import Edge, Node

BOX_WIDTH, BOX_HEIGHT = 184, 24
_ROW_STEP, _LANE_STEP = BOX_HEIGHT + 16, BOX_WIDTH + 14
_STAGE_GAP, _HEAD = 64, 46
_LEAST_WIDTH, _ASPECT = 1500, 2.4  # of the picture, before the columns go on below
_MARGIN = 16
_MOST_ROWS = 24  # of a column; a longer one is wrapped
_WIDEST_EDGE = 9.0


class Column(NamedTuple):
    """The column of a stage."""

    stage: int
    x: float
    top: float
    width: float
    height: float


class Line(NamedTuple):
    """An edge: its index, the path of its line in SVG, its width, and whether it is cut."""

    edge: int
    path: str
    width: float
    is_cut: bool


class Layout(NamedTuple):
    """Positions of all boxes and lines, in pixels.

    places: left and top of each node's box.
    """

    width: float
    height: float
    columns: list[Column]
    places: list[tuple[float, float]]
    lines: list[Line]


def lay_out(nodes: Sequence[Node], edges: Sequence[Edge], stages: int) -> Layout:
    """Compute the layout of an acyclic graph. ``nodes`` are in execution order."""
    rows = _rows(nodes, edges)
    own: list[list[int]] = [[] for _ in range(stages)]
    for place, node in enumerate(nodes):
        own[node.stage].append(place)
    places = [(0.0, 0.0)] * len(nodes)
    widest_row = max(_LEAST_WIDTH, sqrt(_ASPECT * len(nodes) * _LANE_STEP * _ROW_STEP))
    columns: list[Column] = []
    left, top, bottom, widest = float(_MARGIN), float(_MARGIN), 0.0, 0.0
    for stage, members in enumerate(own):
        width, height = _place_stage(members, rows, left + _MARGIN, top + _HEAD, places)
        if left > _MARGIN and left + width > widest_row:
            # The next stages go below.
            columns = _of_one_height(columns, top, bottom)
            left, top, bottom = float(_MARGIN), bottom + _STAGE_GAP, 0.0
            width, height = _place_stage(members, rows, left + _MARGIN, top + _HEAD, places)
        columns.append(Column(stage, left, top, width + 2 * _MARGIN, 0))
        bottom = max(bottom, top + _HEAD + height + _MARGIN)
        left += width + 2 * _MARGIN + _STAGE_GAP
        widest = max(widest, left - _STAGE_GAP)
    columns = _of_one_height(columns, top, bottom)
    return Layout(widest + _MARGIN, bottom + _MARGIN, columns, places, _lines(nodes, edges, places))


def _of_one_height(columns: Sequence[Column], top: float, bottom: float) -> list[Column]:
    return [each._replace(height=bottom - top) if each.top == top else each for each in columns]


def _rows(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[int]:
    """Return the row of each node in its stage: the longest path of edges within the stage that ends there."""
    before: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        if nodes[edge.source].stage == nodes[edge.target].stage:
            before[edge.target].append(edge.source)
    rows: list[int] = []
    for place in range(len(nodes)):
        rows.append(max((rows[source] + 1 for source in before[place]), default=0))
    return rows


def _place_stage(
    members: Sequence[int], rows: Sequence[int], left: float, top: float, places: list[tuple[float, float]]
) -> tuple[float, float]:
    """Place the nodes of a stage from ``left`` and ``top`` on; return its width and its height."""
    in_row: dict[int, list[int]] = defaultdict(list)
    for place in members:
        in_row[rows[place]].append(place)
    count = max(in_row) + 1
    width = 0.0
    for first in range(0, count, _MOST_ROWS):
        part = range(first, min(first + _MOST_ROWS, count))
        lanes = max(len(in_row[row]) for row in part)
        for row in part:
            # Fewer branches than lanes stand in the middle.
            indent = (lanes - len(in_row[row])) * _LANE_STEP / 2
            for lane, place in enumerate(in_row[row]):
                x = left + width + indent + lane * _LANE_STEP
                places[place] = x, top + (row - first) * _ROW_STEP
        width += lanes * _LANE_STEP
    return width - (_LANE_STEP - BOX_WIDTH), min(count, _MOST_ROWS) * _ROW_STEP - (_ROW_STEP - BOX_HEIGHT)


def _lines(nodes: Sequence[Node], edges: Sequence[Edge], places: Sequence[tuple[float, float]]) -> list[Line]:
    largest = max((edge.bytes for edge in edges), default=0) or 1
    found = []
    for at, edge in enumerate(edges):
        is_cut = nodes[edge.source].stage != nodes[edge.target].stage
        width = 1.2 + (_WIDEST_EDGE - 1.2) * edge.bytes / largest if is_cut else 1.2
        found.append(Line(at, _path(places[edge.source], places[edge.target]), width, is_cut))
    # Cut edges lie over the others.
    return sorted(found, key=lambda line: line.is_cut)


def _path(source: tuple[float, float], target: tuple[float, float]) -> str:
    """Return a path from box to box: straight down to the next row, else out of the right side and in on the left."""
    (x, y), (to_x, to_y) = source, target
    middle = BOX_WIDTH / 2
    down = to_y - y - BOX_HEIGHT
    if abs(to_x - x) < 0.6 * BOX_WIDTH and down > 0:
        if down <= _ROW_STEP:
            return f"M{x + middle:.1f} {y + BOX_HEIGHT:.1f} L{to_x + middle:.1f} {to_y:.1f}"
        # Past the boxes between them.
        side, out = x + BOX_WIDTH, x + BOX_WIDTH + 10
        start, end = y + BOX_HEIGHT / 2, to_y + BOX_HEIGHT / 2
        right = to_x + BOX_WIDTH
        return f"M{side:.1f} {start:.1f} C{out:.1f} {start:.1f} {out:.1f} {end:.1f} {right:.1f} {end:.1f}"
    is_near = abs(to_x - x) < 3 * _LANE_STEP and down < 2 * _ROW_STEP
    if down > 0 and (is_near or to_x < x):
        bend = (y + BOX_HEIGHT + to_y) / 2
        return (
            f"M{x + middle:.1f} {y + BOX_HEIGHT:.1f} C{x + middle:.1f} {bend:.1f} {to_x + middle:.1f} {bend:.1f} "
            f"{to_x + middle:.1f} {to_y:.1f}"
        )
    start_x, start_y, end_y = x + BOX_WIDTH, y + BOX_HEIGHT / 2, to_y + BOX_HEIGHT / 2
    bend = max(30.0, abs(to_x - start_x) / 2)
    return (
        f"M{start_x:.1f} {start_y:.1f} C{start_x + bend:.1f} {start_y:.1f} {to_x - bend:.1f} {end_y:.1f} "
        f"{to_x:.1f} {end_y:.1f}"
    )
