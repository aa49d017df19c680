"""Draws a timeline as text, to scale."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

from ..core.action import COMMUNICATION, Action, Kind
from ..core.schedule import Schedule

_FILL = {
    Kind.OVERLAP_F_B: "x",
    Kind.RECOMPUTE: "r",
    Kind.OFFLOAD: "o",
    Kind.RELOAD: "l",
    Kind.REDUCE_GRAD: "g",
    Kind.OPT_STEP: "s",
}
_MOST_PANELS = 4


def draw(
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    width: int | None,
) -> str:
    """Return the timeline as text, to scale; `Timeline.draw` explains how to read it."""
    first = min(map(min, filter(None, starts)), default=0.0)
    seconds = max(map(max, filter(None, ends)), default=0.0) - first
    digits = len(str(schedule.devices - 1))
    wanted = round(seconds * len(str(schedule.micro_batches - 1)) / _short(schedule, starts, ends))
    room = max(1, wanted if width is None else width - digits - 2)
    panels = min(max(1, -(-wanted // room)), _MOST_PANELS)
    scale = room * panels / seconds if seconds else 0.0
    lines = []
    for device, row in enumerate(zip(schedule.actions, starts, ends, strict=True)):
        line = ["."] * (room * panels)
        for action, start, end in zip(*row, strict=True):
            begin, stop = round((start - first) * scale), round((end - first) * scale)
            if action.kind not in COMMUNICATION:
                line[begin:stop] = _cell(schedule, device, action, stop - begin)
        lines.append("".join(line))
    return "\n\n".join(
        "\n".join(f"{device:>{digits}} |{line[begin : begin + room]}" for device, line in enumerate(lines))
        for begin in range(0, room * panels, room)
    )


def _short(schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> float:
    """Seconds of a short action: three quarters of them are longer."""
    lengths = [
        end - start
        for row in zip(schedule.actions, starts, ends, strict=True)
        for action, start, end in zip(*row, strict=True)
        if end > start and action.kind not in COMMUNICATION
    ]
    return quantiles(lengths, n=4, method="inclusive")[0] if len(lengths) > 1 else 1.0


def _cell(schedule: Schedule, device: int, action: Action, columns: int) -> str:
    """Return the action as ``columns`` characters: micro-batch, then the letter of its kind."""
    fill = _FILL.get(action.kind, action.kind.value.lower()[0])
    label = "x".join(str(leaf.micro_batch) for leaf in action.leaves if leaf.micro_batch is not None)
    if schedule.stages_of(device).index(action.leaves[0].stage) % 2:
        fill = fill.upper()
    if len(label) > columns:
        label = label[-columns:] if columns else ""
    return label.ljust(columns, fill)
