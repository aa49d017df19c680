"""The report section with the idle time of each device, by phase of the step and by cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules import Timeline

from ...units import counted, format_seconds
from ..plan_tables import stage_numbers
from ..quantity import TimeUnit, percent
from ..table import Column, FittingTable
from .data_table import TABLE_ASSETS, data_table
from .run import Run, timelines_of
from .section import Section, render

_LEAST = 1e-9  # of the step; differences of sums can be this far from zero
_DRAWN = 2e-4  # of the step; what is smaller has no part in the bars


@dataclass(frozen=True)
class Part:
    """A part of the step's time on each device.

    Attributes:
        word: in the legend and the table.
        colour: the variable of page.css.
        seconds: one number a device.
    """

    word: str
    colour: str
    seconds: list[float]


def idle_section(runs: Sequence[Run]) -> Section | None:
    """Return the section with the idle time of all runs; None if no run has a timeline."""
    shown = [_shown(name, timeline, run.row_names) for run, name, timeline in timelines_of(runs)]
    if not shown:
        return None
    return Section(
        key="idle",
        title="Idle time",
        html=render("idle.html", timelines=shown),
        assets=("charts.css", "bars.css", "tips.js", *TABLE_ASSETS),
    )


def _shown(name: str, timeline: Timeline, devices: Sequence[str]) -> dict[str, object]:
    makespan = timeline.makespan
    busy = Part("busy", "busy", list(timeline.busy))
    phases, causes = phases_of(timeline), causes_of(timeline)
    least = makespan * _DRAWN

    def bars(parts: list[Part]) -> dict[str, object]:
        kept = [part for part in (busy, *parts) if any(seconds > least for seconds in part.seconds)]
        rows = [
            (
                devices[row],
                [
                    (part, 100 * part.seconds[row] / makespan, format_seconds(part.seconds[row]))
                    for part in kept
                    if part.seconds[row] > least
                ],
            )
            for row in range(len(devices))
        ]
        return {"legend": kept, "rows": rows if makespan else []}

    return {
        "name": name,
        "straggler": _straggler(timeline, devices),
        "bars": {"By cause": bars(causes), "By phase": bars(phases)},
        "table": data_table(_table(name, timeline, devices, [*phases, *causes])),
    }


def phases_of(timeline: Timeline) -> list[Part]:
    """Split the idle time of each device by the phase of the step."""
    idle = timeline.idle
    return [
        Part("ramp", "series-0", [each.warm_up for each in idle]),
        Part("steady", "series-1", [each.steady for each in idle]),
        Part("cool-down", "series-2", [each.cool_down for each in idle]),
    ]


def causes_of(timeline: Timeline) -> list[Part]:
    """Split the idle time of each device by its cause.

    Of the time for which a device waits for others, up to what the busiest device computes longer than it is due to
    that straggler.
    """
    most = max(timeline.busy, default=0.0)
    idle = timeline.idle
    straggler = [min(each.producer, most - busy) for each, busy in zip(idle, timeline.busy, strict=True)]
    return [
        Part("waits for the straggler", "series-5", straggler),
        Part(
            "waits for a device",
            "series-1",
            [each.producer - own for each, own in zip(idle, straggler, strict=True)],
        ),
        Part("waits for a message", "series-4", [each.transfer for each in idle]),
        Part("starts late", "series-3", [each.delay for each in idle]),
        Part("has finished", "series-0", [each.finished for each in idle]),
    ]


def _straggler(timeline: Timeline, devices: Sequence[str]) -> str:
    """Say which device computes most, and how much more than the mean; nothing for one device."""
    busy = timeline.busy
    if len(busy) < 2:
        return ""
    mean = sum(busy) / len(busy)
    most = max(range(len(busy)), key=busy.__getitem__)
    if not mean or busy[most] / mean < 1.005:
        return "All devices compute about equally long: there is no straggler."
    stages = timeline.schedule.stages_of(most)
    return (
        f"The straggler is {devices[most]} (stage {stage_numbers(stages)}): it computes "
        f"{format_seconds(busy[most])}, {busy[most] / mean - 1:.1%} more than the mean of "
        f"{counted(len(busy), 'device')}."
    )


def _table(name: str, timeline: Timeline, devices: Sequence[str], parts: Sequence[Part]) -> FittingTable:
    unit = TimeUnit.for_all([timeline.makespan])
    least = timeline.makespan * _LEAST
    idle = [each.total for each in timeline.idle]

    def times(word: str, seconds: Sequence[float]) -> Column:
        return Column(f"{word}\n{unit.name}", [unit.text(each if each > least else 0.0) for each in seconds])

    return FittingTable(
        f"Idle time of each device, {name}",
        [
            Column("device", list(devices), text=True),
            times("busy", timeline.busy),
            times("idle", idle),
            Column(
                "idle", [percent(each / timeline.makespan if timeline.makespan else 0.0) for each in idle]
            ),
            *(times(part.word, part.seconds) for part in parts),
        ],
    )
