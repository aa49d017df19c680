"""Draws a timeline as text, to scale."""

from __future__ import annotations

from ..core.action import Action, Kind
from ..core.schedule import Schedule
from ..core.timed_schedule import TimedSchedule

_FILL = {
    Kind.RECOMPUTE: "r",
    Kind.OFFLOAD: "o",
    Kind.RELOAD: "l",
    Kind.REDUCE_GRAD: "g",
    Kind.OPT_STEP: "s",
}
_MOST_PANELS = 4


def draw(timeline: TimedSchedule, width: int | None) -> str:
    """Return the timeline as text, to scale; `Timeline.draw` explains how to read it."""
    schedule, seconds = timeline.schedule, timeline.makespan
    digits = len(str(schedule.devices - 1))
    wanted = round(seconds * len(str(schedule.micro_batches - 1)) / (timeline.short_action or 1.0))
    room = max(1, wanted if width is None else width - digits - 2)
    panels = min(max(1, -(-wanted // room)), _MOST_PANELS)
    scale = room * panels / seconds if seconds else 0.0
    lines = []
    for device, row in enumerate(timeline.rows):
        line = ["."] * (room * panels)
        for action, start, end in row:
            begin, stop = round((start - timeline.origin) * scale), round((end - timeline.origin) * scale)
            line[begin:stop] = _cell(schedule, device, action, stop - begin)
        lines.append("".join(line))
    return "\n\n".join(
        "\n".join(f"{device:>{digits}} |{line[begin : begin + room]}" for device, line in enumerate(lines))
        for begin in range(0, room * panels, room)
    )


def _cell(schedule: Schedule, device: int, action: Action, columns: int) -> str:
    """Return the action as ``columns`` characters: micro-batch, then the letter of its kind."""
    fill = _FILL.get(action.kind, action.kind.value.lower()[0])
    label = "" if action.micro_batch is None else str(action.micro_batch)
    if schedule.stages_of(device).index(action.stage) % 2:
        fill = fill.upper()
    if len(label) > columns:
        label = label[-columns:] if columns else ""
    return label.ljust(columns, fill)
