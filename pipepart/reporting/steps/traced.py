"""Reports on traced steps: where the time went, and which actions took longer than predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from rich.console import Group, RenderableType

from schedules import Kind, Timeline

from ...runtime.observe.trace import Trace
from ...units import format_seconds
from ..kit.labels import labelled_lines
from ..kit.quantity import NONE, TimeUnit, percent
from ..kit.table import Column, FittingTable
from .simulated import idle_table
from .timeline import drawn_timeline

_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for the inputs",
    Kind.W: "backward for the weights",
    Kind.RECOMPUTE: "recompute",
    Kind.REDUCE_GRAD: "sum over replicas",
    Kind.OPT_STEP: "optimizer step",
}
_Durations = dict[tuple[int, Kind], list[float]]


def trace_reports(trace: Trace) -> list[RenderableType]:
    """Summary, devices, actions and timeline of the steps of a trace.

    Raises:
        ValueError: there is no step of the plan's number of micro-batches in it.
    """
    names = [device.name for device in trace.plan.workers]
    return [
        trace_summary(trace),
        idle_table(trace.median, names),
        action_table(trace),
        drawn_timeline(trace.median, "Measured timeline of the median step", names),
    ]


def trace_summary(trace: Trace) -> Group:
    """Summarise the measured step times and their ratio to the prediction."""
    steps, step, predicted = _whole(trace), trace.median, trace.predicted
    spans = [each.makespan for each in steps]
    what = f"{len(steps)} traced" if len(steps) > 1 else "1 traced"
    lines = [
        ("schedule", f"{step.schedule.name}, {step.schedule.micro_batches} micro-batches"),
        (
            "steps",
            f"{what}, median {format_seconds(step.makespan)}, "
            f"from {format_seconds(min(spans))} to {format_seconds(max(spans))}",
        ),
    ]
    if predicted and trace.ratio:
        off = 1 / trace.ratio - 1
        how = "as predicted" if abs(off) < 0.005 else f"{abs(off):.0%} {'longer' if off > 0 else 'shorter'}"
        lines.append(
            (
                "predicted",
                f"{format_seconds(predicted.makespan)}: the median is {how} (ratio {trace.ratio:.2f})",
            )
        )
    expected = f", {percent(predicted.bubble)} predicted" if predicted else ""
    lines.append(("bubble", f"{percent(step.bubble)} of the devices' time is idle{expected}"))
    return labelled_lines("Trace", lines)


def action_table(trace: Trace) -> FittingTable:
    """Make a table of measured and predicted action times, by stage and kind; largest effect on the step first."""
    measured = _durations(_whole(trace))
    predicted = _durations([trace.predicted] if trace.predicted else [])
    schedule = trace.median.schedule
    times = {
        key: sum(action[:2] == key[::-1] for row in schedule.actions for action in row) for key in measured
    }
    found = {key: median(seconds) for key, seconds in measured.items()}
    expected = {key: median(predicted.get(key, [0.0])) for key in measured}
    surplus = {key: times[key] * (found[key] - expected[key]) for key in measured}
    keys = sorted(measured, key=lambda key: -abs(surplus[key]) if trace.predicted else key[0])
    unit = TimeUnit.for_all([*found.values(), *expected.values()])
    whole = TimeUnit.for_all(map(abs, surplus.values()))
    columns = [
        Column("stage", [str(stage) for stage, _ in keys]),
        Column("action", [_WORDS.get(kind, kind.value) for _, kind in keys], text=True),
        Column("a step", [f"{times[key]}×" for key in keys], rank=1),
        Column(f"measured\n{unit.name}", [unit.text(found[key]) for key in keys]),
    ]
    if trace.predicted:
        columns += [
            Column(f"predicted\n{unit.name}", [unit.text(expected[key]) for key in keys]),
            Column("off by", [_off(found[key], expected[key]) for key in keys]),
            Column(
                f"in total\n{whole.name}",
                [f"{surplus[key] / whole.seconds:+.{whole.digits}f}" for key in keys],
                name="in total",
            ),
        ]
    return FittingTable(
        "Actions: median of all micro-batches and steps",
        columns,
        notes=["In total: what the actions add to a step's work, measured minus predicted."]
        if trace.predicted
        else [],
    )


def _whole(trace: Trace) -> list[Timeline]:
    """Return the trace's steps with the plan's number of micro-batches."""
    return [step for step in trace.steps if step.schedule == trace.median.schedule]


def _durations(timelines: Sequence[Timeline]) -> _Durations:
    found: _Durations = defaultdict(list)
    for timeline in timelines:
        for row in zip(timeline.schedule.actions, timeline.starts, timeline.ends, strict=True):
            for action, start, end in zip(*row, strict=True):
                found[action.stage, action.kind].append(end - start)
    return found


def _off(measured: float, predicted: float) -> str:
    return f"{measured / predicted - 1:+.0%}" if predicted else NONE
