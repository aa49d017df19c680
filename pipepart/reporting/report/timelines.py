"""The section of the report with the timelines: predicted and measured steps on one axis, as boxes of actions."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from schedules import Action, Kind, Timeline
from schedules.analysis.waits import Wait, waits
from schedules.pictures.colours import LOOKS

from ...units import format_seconds
from ..plan_tables import stage_numbers
from ..quantity import TimeUnit, percent
from ..table import Column, FittingTable
from .bars import Bars, Part, bars
from .run import Run, timelines_of

_MOST_BOXES = 3000  # of a timeline; more actions are drawn as paths, without numbers and tips
_PATH_UNITS = 100_000  # of the axis, in the coordinates of paths
_ROW_HEIGHTS = ((8, 26), (16, 20), (32, 14))  # up to so many devices, pixels of a row
_LEVELS = (1, 2, 4, 8, 16, 32, 64)  # widths of a picture from which on labels are shown, in units of
_LEVEL_WIDTH = 500  # pixels, as in page.js
_TICKS = 8  # at most, on a width of level 1
_DRAWN = 1e-3  # of the axis; shorter idle times have no tip


class Box(NamedTuple):
    """An action, or the idle time before it. ``left`` and ``width`` are percentages of the axis.

    look: its classes in page.css.
    tip: what the browser shows under the pointer.
    label: the number of the micro-batch.
    level: of the widths of the picture, the least at which the label fits; 0 if it never does.
    """

    left: float
    width: float
    look: str
    tip: str = ""
    label: str = ""
    level: int = 0


class Row(NamedTuple):
    """A device: its boxes; or, if the timeline has too many, the look and the path of each kind of action."""

    boxes: list[Box]
    paths: list[tuple[str, str]]


class Tick(NamedTuple):
    """A moment on the axis: its place in percent, its text, and the least level at which it is shown."""

    left: float
    text: str
    level: int


class Step(NamedTuple):
    """A timeline as page.html shows it.

    figures: its length and its idle time.
    height: pixels of a row.
    end: where the step ends, in percent of the axis.
    rows: one a device.
    bars, table: what each device spends the step on.
    """

    name: str
    figures: str
    names: Sequence[str]
    height: int
    end: float
    rows: list[Row]
    bars: Bars
    table: FittingTable


class Timelines(NamedTuple):
    """All timelines on their common axis.

    looks: the kinds of action in them, as class in page.css and word of the legend.
    chunked: whether a device has several stages.
    has_boxes: whether all actions are boxes with tips.
    """

    steps: list[Step]
    ticks: list[Tick]
    looks: list[tuple[str, str]]
    chunked: bool
    has_boxes: bool


def timelines_section(runs: Sequence[Run]) -> Timelines | None:
    """Return the timelines of all runs; None if no run has one."""
    shown = timelines_of(runs)
    if not shown:
        return None
    span = max(timeline.makespan for _, _, timeline in shown) or 1.0
    kinds = {kind for _, _, timeline in shown for kind in _kinds(timeline)}
    return Timelines(
        steps=[_step(run, name, timeline, span) for run, name, timeline in shown],
        ticks=_ticks(span),
        looks=[(kind_class(kind), look.word) for kind, look in LOOKS.items() if kind in kinds],
        chunked=any(timeline.schedule.stages > timeline.schedule.devices for _, _, timeline in shown),
        has_boxes=all(_has_boxes(timeline) for _, _, timeline in shown),
    )


def kind_class(kind: Kind) -> str:
    """Return the class of a kind of action in the style of the page."""
    return f"kind-{kind.name.lower()}"


def _kinds(timeline: Timeline) -> list[Kind]:
    """Return the kinds of action that are drawn, in the order of the legend."""
    present = {action.kind for row in timeline.schedule.actions for action in row}
    return [kind for kind in LOOKS if kind in present]


def _has_boxes(timeline: Timeline) -> bool:
    return sum(map(len, timeline.schedule.actions)) <= _MOST_BOXES


def _step(run: Run, name: str, timeline: Timeline, span: float) -> Step:
    devices = len(run.row_names)
    parts = _parts(timeline)
    rows = _box_rows(run, timeline, span) if _has_boxes(timeline) else _path_rows(timeline, span)
    return Step(
        name=name,
        figures=f"{format_seconds(timeline.makespan)}, {percent(timeline.bubble)} idle",
        names=run.row_names,
        height=next((height for most, height in _ROW_HEIGHTS if devices <= most), 10),
        end=100 * timeline.makespan / span,
        rows=rows,
        bars=bars(run.row_names, parts, timeline.makespan, format_seconds),
        table=_table(f"Time of each device, {name}", timeline, run.row_names, parts),
    )


def _parts(timeline: Timeline) -> list[Part]:
    """Split the step of each device into the kinds of its actions and the causes of its idle time."""
    seconds = {kind: [0.0] * timeline.schedule.devices for kind in _kinds(timeline)}
    for device, row in enumerate(zip(timeline.schedule.actions, timeline.starts, timeline.ends, strict=True)):
        for action, start, end in zip(*row, strict=True):
            if action.kind in seconds:
                seconds[action.kind][device] += end - start
    idle = timeline.idle
    return [
        *(Part(LOOKS[kind].word, kind_class(kind), values) for kind, values in seconds.items()),
        Part("waits for a device", "wait-device", [each.producer for each in idle]),
        Part("waits for a message", "wait-message", [each.transfer for each in idle]),
        Part("delay", "delay", [each.delay for each in idle]),
        Part("drained", "drained", [each.finished for each in idle]),
    ]


def _table(title: str, timeline: Timeline, devices: Sequence[str], parts: Sequence[Part]) -> FittingTable:
    unit = TimeUnit.for_all([timeline.makespan])
    stages = [
        stage_numbers(timeline.schedule.stages_of(row), timeline.schedule.model_stages)
        for row in range(len(devices))
    ]
    idle = [each.total / (timeline.makespan or 1.0) for each in timeline.idle]
    least = 1e-9 * timeline.makespan  # differences of sums can be this far from zero
    return FittingTable(
        title,
        [
            Column("device", list(devices), text=True),
            Column("stages", stages),
            *(
                Column(
                    f"{part.word}\n{unit.name}",
                    [unit.text(seconds if seconds > least else 0.0) for seconds in part.values],
                )
                for part in parts
            ),
            Column("idle", list(map(percent, idle))),
        ],
    )


def _box_rows(run: Run, timeline: Timeline, span: float) -> list[Row]:
    """Return a box for each action, with what happened in it, and one for each idle time, with what it waited for."""
    schedule = timeline.schedule
    origin = _origin(timeline)
    predicted = run.predicted if timeline is run.measured else None
    if predicted is not None and predicted.schedule != schedule:
        predicted = None
    rows = []
    for device, row_waits in enumerate(waits(timeline)):
        chunk_of = {stage: at for at, stage in enumerate(schedule.stages_of(device))}
        boxes = []
        for at, (action, start, end, wait) in enumerate(
            zip(
                schedule.actions[device],
                timeline.starts[device],
                timeline.ends[device],
                row_waits,
                strict=True,
            )
        ):
            if wait.total > _DRAWN * span:
                left, width = 100 * (wait.begin - origin) / span, 100 * wait.total / span
                boxes.append(Box(left, width, "gap", _wait_tip(run, schedule.device_of, action, wait)))
            if action.kind not in LOOKS or end <= start:
                continue
            tip = _tip(action, start - origin, end - origin, schedule.model_stages)
            if predicted is not None:
                seconds = predicted.ends[device][at] - predicted.starts[device][at]
                tip = f"{tip}\npredicted: {format_seconds(seconds)}"
            label = "" if action.micro_batch is None else str(action.micro_batch)
            share = (end - start) / span
            needed = 7 * len(label) + 3
            level = next((level for level in _LEVELS if share * _LEVEL_WIDTH * level > needed), 0)
            look = _look(action, chunk_of)
            boxes.append(Box(100 * (start - origin) / span, 100 * share, look, tip, label, level))
        rows.append(Row(boxes, []))
    return rows


def _tip(action: Action, start: float, end: float, model_stages: int) -> str:
    replica, stage = divmod(action.stage, model_stages)
    words = [
        f"{action}: {LOOKS[action.kind].word}",
        f"stage {stage}{f' of replica {replica}' if replica else ''}",
    ]
    if action.micro_batch is not None:
        words.append(f"micro-batch {action.micro_batch}")
    seconds = f"{format_seconds(start)} to {format_seconds(end)}: {format_seconds(end - start)}"
    return f"{', '.join(words)}\n{seconds}"


def _wait_tip(run: Run, device_of: Sequence[int], action: Action, wait: Wait) -> str:
    lines = [f"idle for {format_seconds(wait.total)} before {action}"]
    least = wait.total * 1e-3
    if wait.producer > least and wait.source is not None:
        producer = run.row_names[device_of[wait.source.stage]]
        lines.append(f"{format_seconds(wait.producer)} until {wait.source} on {producer} ends")
    if wait.transfer > least:
        lines.append(f"{format_seconds(wait.transfer)} until its message arrives")
    if wait.delay > least:
        lines.append(f"{format_seconds(wait.delay)} delay: its inputs are there")
    return "\n".join(lines)


def _path_rows(timeline: Timeline, span: float) -> list[Row]:
    """Return a path for the actions of each kind and chunk of a device: a rectangle of height 1 for each."""
    schedule, origin = timeline.schedule, _origin(timeline)
    rows = []
    for device, row in enumerate(zip(schedule.actions, timeline.starts, timeline.ends, strict=True)):
        chunk_of = {stage: at for at, stage in enumerate(schedule.stages_of(device))}
        paths: dict[str, list[str]] = {}
        for action, start, end in zip(*row, strict=True):
            if action.kind in LOOKS:
                left, right = (round(_PATH_UNITS * (each - origin) / span) for each in (start, end))
                paths.setdefault(_look(action, chunk_of), []).append(f"M{left} 0H{right}V1H{left}z")
        rows.append(Row([], [(look, "".join(pieces)) for look, pieces in paths.items()]))
    return rows


def _origin(timeline: Timeline) -> float:
    return min((min(row) for row in timeline.starts if len(row)), default=0.0)


def _look(action: Action, chunk_of: dict[int, int]) -> str:
    return f"{kind_class(action.kind)}{' dark' if chunk_of[action.stage] % 2 else ''}"


def _ticks(span: float) -> list[Tick]:
    """Return round moments of the axis, more of them at higher levels.

    Steps are 1, 2, 10, 20, 100, ...: each one divides the next one, so that moments of a level are those of the next.
    """
    unit = TimeUnit.for_all([span])
    length = span / unit.seconds
    ticks: dict[int, Tick] = {}
    for level in (1, 2, 8, 32):
        least = length / _TICKS / level
        power = 10.0 ** floor(log10(least))
        step = next(power * digit for digit in (1, 2, 10) if power * digit >= least)
        for number in range(ceil(length / step)):
            left = 100 * number * step / length
            text = f"{number * step:.6g} {unit.name}" if number else "0"
            ticks.setdefault(round(left * 1000), Tick(left, text, level))
    return list(ticks.values())
