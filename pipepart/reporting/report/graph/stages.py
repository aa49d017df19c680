"""Places one box for each stage of a plan, from left to right and row by row, and the edges between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....planning import Plan

BOX_WIDTH, BOX_HEIGHT = 160, 84
_GAP, _ROW_GAP, _MARGIN = 64, 56, 20
_PER_ROW = 6
_WIDEST_EDGE, _ARC = 12.0, 34


class StageEdge(NamedTuple):
    """The tensors sent from a stage to a later stage.

    path: of its line in SVG.
    width: of the line.
    label_x, label_y: where its bytes are written.
    """

    source: int
    target: int
    bytes: int
    path: str
    width: float
    label_x: float
    label_y: float


class StageLayout(NamedTuple):
    """Positions of the stages' boxes and of the edges between them, in pixels."""

    width: float
    height: float
    places: Sequence[tuple[float, float]]
    edges: list[StageEdge]


def lay_out_stages(plan: Plan) -> StageLayout:
    """Compute the layout of a plan's stages, with edges to the next stage and to later stages."""
    stages = len(plan.stages)
    sizes = {(at, at + 1): stage.output_bytes for at, stage in enumerate(plan.stages[:-1])}
    sizes |= {(at, skip.target): skip.bytes for at, stage in enumerate(plan.stages) for skip in stage.skips}
    largest = max(sizes.values(), default=0) or 1
    has_skips = any(target > source + 1 for source, target in sizes)
    top = _MARGIN + (_ARC if has_skips else 0)
    step = BOX_HEIGHT + _ROW_GAP + (_ARC if has_skips else 0)
    places = [
        (_MARGIN + (stage % _PER_ROW) * (BOX_WIDTH + _GAP), float(top + stage // _PER_ROW * step))
        for stage in range(stages)
    ]
    rows = -(-stages // _PER_ROW)
    drawn = []
    for (source, target), size in sorted(sizes.items()):
        path, x, y = _path(places[source], places[target], target - source)
        drawn.append(StageEdge(source, target, size, path, 1.5 + (_WIDEST_EDGE - 1.5) * size / largest, x, y))
    width = 2 * _MARGIN + min(stages, _PER_ROW) * (BOX_WIDTH + _GAP) - _GAP
    return StageLayout(width, top + rows * step - (step - BOX_HEIGHT) + _MARGIN, places, drawn)


def _path(
    source: tuple[float, float], target: tuple[float, float], distance: int
) -> tuple[str, float, float]:
    """Return the line, and where its label stands: straight to the next box, in an arc over the boxes between."""
    (x, y), (to_x, to_y) = source, target
    middle = y + BOX_HEIGHT / 2
    if y != to_y:
        start, end = x + BOX_WIDTH / 2, to_x + BOX_WIDTH / 2
        bottom, bend = y + BOX_HEIGHT, (y + BOX_HEIGHT + to_y) / 2
        path = f"M{start:.1f} {bottom:.1f} C{start:.1f} {bend:.1f} {end:.1f} {bend:.1f} {end:.1f} {to_y:.1f}"
        return path, (start + end) / 2, bend - 4
    if distance == 1:
        path = f"M{x + BOX_WIDTH:.1f} {middle:.1f} L{to_x:.1f} {middle:.1f}"
        return path, (x + BOX_WIDTH + to_x) / 2, middle - 10
    # Longer arcs begin further left and are higher.
    high = y - _ARC * (1.2 - 0.6 / distance)
    start, end = x + BOX_WIDTH * 0.7, to_x + BOX_WIDTH * 0.3
    path = f"M{start:.1f} {y:.1f} C{start:.1f} {high:.1f} {end:.1f} {high:.1f} {end:.1f} {to_y:.1f}"
    return path, (start + end) / 2, y + 0.75 * (high - y) - 6
