"""Reports on measured steps: their times, and which actions differ from the plan."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from schedules import Kind, Timeline

from ..input_error import InputError
from ..planning import Plan
from ..runtime.observe.trace import Trace
from ..units import format_seconds
from .quantity import NONE, TimeUnit, longer, percent
from .simulated import idle_table
from .table import Column, FittingTable, labelled_lines, times
from .timeline import drawn_timeline

WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for the inputs",
    Kind.W: "backward for the weights",
    Kind.RECOMPUTE: "recompute",
    Kind.OFFLOAD: "copy to the host",
    Kind.RELOAD: "copy from the host",
    Kind.REDUCE_GRAD: "sum over replicas",
    Kind.OPT_STEP: "optimizer step",
}


def measured_against_plan(plan: Plan, step_seconds: Sequence[float]) -> Text:
    """Compare the median of measured steps with the predicted step, in one line.

    Args:
        plan: what was run.
        step_seconds: measured steps of whole mini-batches, in seconds, without the first ones, which warm up.

    Raises:
        ValueError: no step was measured, or the plan has no prediction.
    """
    if not step_seconds:
        raise InputError("no step was measured: give the seconds of at least 1")
    predicted, measured = plan.predicted.step_seconds, statistics.median(step_seconds)
    return Text.assemble(
        ("Step  ", "bold"),
        f"predicted {format_seconds(predicted)}, measured {format_seconds(measured)} "
        f"(median of {len(step_seconds)}): {longer(measured / predicted, 'as predicted')}",
    )


def trace_reports(trace: Trace) -> list[RenderableType]:
    """Return the summary, devices, actions and timeline of the steps of a trace.

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
    step, predicted = trace.median, trace.predicted
    spans = [each.makespan for each in _whole(trace)]
    lines = [
        (
            "steps",
            f"{len(spans)} traced, median {format_seconds(step.makespan)}, "
            f"from {format_seconds(min(spans))} to {format_seconds(max(spans))}",
        ),
    ]
    expected = ""
    if predicted and trace.ratio:
        how = longer(1 / trace.ratio, "as predicted")
        text = f"{format_seconds(predicted.makespan)}: the median is {how} (ratio {trace.ratio:.2f})"
        lines.append(("predicted", text))
        expected = f", {percent(predicted.bubble)} predicted"
    lines.append(("bubble", f"{percent(step.bubble)} of the devices' time is idle{expected}"))
    return labelled_lines("Trace", lines)


def action_table(trace: Trace) -> FittingTable:
    """Make a table of measured and predicted action times, by stage and kind; largest effect on the step first."""
    measured = _medians(_whole(trace))
    predicted = _medians([trace.predicted] if trace.predicted else [])
    counts = Counter((action.stage, action.kind) for row in trace.median.schedule.actions for action in row)
    more = {key: counts[key] * (seconds - predicted.get(key, 0.0)) for key, seconds in measured.items()}
    keys = sorted(measured, key=lambda key: -abs(more[key]) if trace.predicted else key[0])
    unit = TimeUnit.for_all([*measured.values(), *predicted.values()])
    columns = [
        Column("stage", [str(stage) for stage, _ in keys]),
        Column("action", [WORDS.get(kind, kind.value) for _, kind in keys], text=True),
        Column("a step", [f"{counts[key]}×" for key in keys], rank=1),
        times("measured", [measured[key] for key in keys], unit),
    ]
    if trace.predicted is not None:
        off = [f"{measured[key] / predicted[key] - 1:+.0%}" if predicted.get(key) else NONE for key in keys]
        columns += [
            times("predicted", [predicted.get(key, 0.0) for key in keys], unit),
            Column("off by", off),
        ]
    return FittingTable("Actions: median of all micro-batches and steps", columns)


def _whole(trace: Trace) -> list[Timeline]:
    """Return the trace's steps with the plan's number of micro-batches."""
    return [step for step in trace.steps if step.schedule == trace.median.schedule]


def _medians(timelines: Sequence[Timeline]) -> dict[tuple[int, Kind], float]:
    """Return the median seconds of the actions of each stage and kind."""
    durations: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for timeline in timelines:
        for key, seconds in action_seconds(timeline).items():
            durations[key] += seconds
    return {key: statistics.median(seconds) for key, seconds in durations.items()}


def action_seconds(timeline: Timeline) -> dict[tuple[int, Kind], list[float]]:
    """Return the seconds of each action, by stage and kind."""
    durations: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for row in zip(timeline.schedule.actions, timeline.starts, timeline.ends, strict=True):
        for action, start, end in zip(*row, strict=True):
            durations[action.stage, action.kind].append(end - start)
    return durations
