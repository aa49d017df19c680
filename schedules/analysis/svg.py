"""A timeline as an SVG picture: one row per device, one box per action."""

from __future__ import annotations

from html import escape

from ..core.action import Kind
from .timeline import Timeline

# Fill colours of even and odd chunks, readable on light and dark pages.
_FILLS = {
    Kind.F: ("#7fb2e5", "#4f8ccb"),
    Kind.B: ("#f2a65e", "#d9822b"),
    Kind.I: ("#8fcf8a", "#5fae5a"),
    Kind.W: ("#e6d36a", "#c9b23c"),
    Kind.RECOMPUTE: ("#b9a3e3", "#9478cf"),
}
_OTHER = ("#c0c4c9", "#a3a8af")
_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for inputs",
    Kind.W: "backward for weights",
    Kind.RECOMPUTE: "recompute",
}
_ROW, _GAP, _LEFT, _FONT = 26, 6, 78, 12


def to_svg(timeline: Timeline, width: int = 900, title: str = "") -> str:
    """Draw a timeline to scale.

    The number in a box is its micro-batch. Boxes of a device's second, fourth, ... stage are darker. Each box has a
    tooltip with its action, start and end.

    Args:
        timeline: simulated or measured.
        width: of the picture, in pixels.
        title: a line above the picture.

    Returns:
        An SVG document.
    """
    schedule = timeline.schedule
    scale = (width - _LEFT - 8) / (timeline.makespan or 1.0)
    top = 24 if title else 6
    height = top + schedule.devices * (_ROW + _GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="{_FONT}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    if title:
        parts.append(f'<text x="8" y="16" font-weight="bold" fill="#222">{escape(title)}</text>')
    kinds: dict[Kind, None] = {}
    for device, row in enumerate(schedule.actions):
        y = top + device * (_ROW + _GAP)
        parts.append(f'<text x="8" y="{y + 17}" fill="#222">device {device}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{width - _LEFT - 8}" height="{_ROW}" fill="#f0f1f3"/>'
        )
        own = schedule.stages_of(device)
        for action, start, end in zip(row, timeline.starts[device], timeline.ends[device], strict=True):
            if end <= start:
                continue
            kinds.setdefault(action.kind)
            fill = _FILLS.get(action.kind, _OTHER)[own.index(action.stage) % 2]
            x, span = _LEFT + start * scale, (end - start) * scale
            parts.append(
                f"<g><title>{escape(str(action))}: {start:.6g} to {end:.6g} s</title>"
                f'<rect x="{x:.2f}" y="{y}" width="{span:.2f}" height="{_ROW}" fill="{fill}" stroke="#ffffff"/>'
            )
            label = "" if action.micro_batch is None else str(action.micro_batch)
            if span > 7 * len(label) + 2:
                parts.append(
                    f'<text x="{x + span / 2:.2f}" y="{y + 17}" text-anchor="middle" fill="#1a1a1a">{label}</text>'
                )
            parts.append("</g>")
    parts += _legend(kinds, height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(kinds: dict[Kind, None], height: int) -> list[str]:
    parts, x = [], _LEFT
    for kind in kinds:
        word = _WORDS.get(kind, kind.value.lower())
        parts.append(
            f'<rect x="{x}" y="{height - 22}" width="12" height="12" fill="{_FILLS.get(kind, _OTHER)[0]}"/>'
            f'<text x="{x + 17}" y="{height - 12}" fill="#222">{word}</text>'
        )
        x += 35 + 7 * len(word)
    return parts
