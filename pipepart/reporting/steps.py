"""Reports on simulated and measured steps: busy and idle times, and differences from the plan."""

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
from ..units import counted as number_of
from ..units import format_seconds
from .plan_tables import stage_numbers
from .quantity import NONE, TimeUnit, longer, percent, size
from .table import Column, FittingTable, bars, labelled_lines
from .timeline import drawn_timeline

_WORDS = {
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
_ROUNDING_SECONDS = 1e-12  # differences of sums can be this far from zero


def simulation_summary(timeline: Timeline, bound: float = 0.0, own: Timeline | None = None) -> Group:
    """Summarise a schedule: makespan, bubble and lower bound.

    Args:
        timeline: simulated.
        bound: seconds that no schedule of these stages on these devices can beat; 0 if unknown.
        own: of the plan's own schedule, to compare with.
    """
    schedule, makespan = timeline.schedule, timeline.makespan
    replicas = f", {schedule.replicas} replicas" if schedule.replicas > 1 else ""
    lines = [
        (
            "schedule",
            f"{schedule.name}, {number_of(schedule.micro_batches, 'micro-batch', 'es')}, "
            f"{number_of(schedule.model_stages, 'stage')} on {number_of(schedule.devices, 'device')}{replicas}",
        ),
        ("makespan", f"{format_seconds(makespan)}{_against_own(timeline, own)}"),
        ("bubble", f"{percent(timeline.bubble)} of the devices' time is idle"),
    ]
    if schedule.versions:
        lines.append(("asynchronous", "weights change within the step: not the numbers of plain training"))
    if bound and makespan:
        text = "no schedule of these stages on these devices is shorter"
        if makespan / bound - 1 >= 1e-9:
            text = (
                f"no schedule of these stages on these devices takes less than {format_seconds(bound)}: "
                f"this one is at most {makespan / bound - 1:.1%} above the best"
            )
        lines.append(("bound", text))
    return labelled_lines("Simulation", lines)


def _against_own(timeline: Timeline, own: Timeline | None) -> str:
    """Compare with the plan's own schedule, per micro-batch if the numbers of these differ."""
    if own is None or not own.makespan or own.schedule == timeline.schedule:
        return ""
    count, own_count = timeline.schedule.micro_batches, own.schedule.micro_batches
    how = longer((timeline.makespan / count) / (own.makespan / own_count), "as long", 1)
    each = "" if count == own_count else " a micro-batch"
    than = "as" if how == "as long" else "than"
    return (
        f", {how}{each} {than} the plan's own {own.schedule.name} with {number_of(own_count, 'micro-batch', 'es')} "
        f"({format_seconds(own.makespan)})"
    )


def idle_table(
    timeline: Timeline,
    devices: Sequence[str] = (),
    *,
    counted: bool = False,
    needs: Sequence[int] = (),
    limits: Sequence[int | None] = (),
) -> FittingTable:
    """Make a table with one row per device: busy time, waits, peak stash.

    Args:
        timeline: simulated or measured.
        devices: their names; numbers if left out.
        counted: the stashes of a device's stages are 1 together: they count the micro-batches in flight.
        needs: the peak memory of each device; left out if unknown.
        limits: the memory of each device, None without a limit; goes with ``needs``.
    """
    schedule, idle = timeline.schedule, timeline.idle
    unit = TimeUnit.for_all([timeline.makespan])
    late = any(each.delay > _ROUNDING_SECONDS for each in idle)
    names = list(devices) or [str(device) for device in range(schedule.devices)]
    shares = [each.total / timeline.makespan if timeline.makespan else 0.0 for each in idle]

    def times(header: str, seconds: Sequence[float], rank: int = 0) -> Column:
        positive = [each if each > _ROUNDING_SECONDS else 0.0 for each in seconds]
        return Column(f"{header}\n{unit.name}", list(map(unit.text, positive)), rank)

    columns = [
        Column("device", names, text=True),
        Column(
            "stages" if schedule.stages > schedule.devices else "stage",
            [stage_numbers(schedule.stages_of(row)) for row in range(schedule.devices)],
        ),
        times("busy", timeline.busy),
        times("waits for\na device", [each.producer for each in idle]),
        times("waits for\na message", [each.transfer for each in idle]),
        *([times("delay", [each.delay for each in idle])] if late else []),
        times("drained", [each.finished for each in idle], rank=1),
        Column("idle", list(map(percent, shares))),
        bars(shares, rank=4),
    ]
    peaks = list(map(round, timeline.peak_bytes))
    if counted:
        columns.append(Column("in flight,\nat most", [f"{peak:g}" for peak in timeline.peak_bytes]))
    elif any(peaks):
        columns.append(Column("stash,\nat most", list(map(size, peaks)), rank=1, name="peak stash"))
    if needs:
        columns.append(Column("memory", list(map(size, needs)), rank=2))
    if any(limits):
        columns.append(Column("limit", [size(limit) if limit else "none" for limit in limits], rank=3))
    notes = ["Delay: between an action's inputs being ready and its start."] if late else []
    notes.append("Drained: the device has finished, and the last one has not.")
    if limits:
        notes += [
            f"Does not fit: {name} needs {size(need)} and has {size(limit)}."
            for name, need, limit in zip(names, needs, limits, strict=True)
            if limit and need > limit
        ]
    return FittingTable("Devices: busy and idle", columns, notes=notes)


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
        ("schedule", f"{step.schedule.name}, {number_of(step.schedule.micro_batches, 'micro-batch', 'es')}"),
        (
            "steps",
            f"{len(spans)} traced, median {format_seconds(step.makespan)}, "
            f"from {format_seconds(min(spans))} to {format_seconds(max(spans))}",
        ),
    ]
    if predicted and trace.ratio:
        how = longer(1 / trace.ratio, "as predicted")
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
    measured = _medians(_whole(trace))
    predicted = _medians([trace.predicted] if trace.predicted else [])
    times = Counter((action.stage, action.kind) for row in trace.median.schedule.actions for action in row)
    off = {key: found - predicted.get(key, 0.0) for key, found in measured.items()}
    keys = sorted(measured, key=lambda key: -abs(times[key] * off[key]) if trace.predicted else key[0])
    unit = TimeUnit.for_all([*measured.values(), *predicted.values()])
    total = TimeUnit.for_all(abs(times[key] * off[key]) for key in keys)
    columns = [
        Column("stage", [str(stage) for stage, _ in keys]),
        Column("action", [_WORDS.get(kind, kind.value) for _, kind in keys], text=True),
        Column("a step", [f"{times[key]}×" for key in keys], rank=1),
        Column(f"measured\n{unit.name}", [unit.text(measured[key]) for key in keys]),
    ]
    if trace.predicted is None:
        return FittingTable("Actions: median of all micro-batches and steps", columns)
    ratios = [f"{off[key] / predicted[key]:+.0%}" if predicted.get(key) else NONE for key in keys]
    totals = [f"{times[key] * off[key] / total.seconds:+.{total.digits}f}" for key in keys]
    columns += [
        Column(f"predicted\n{unit.name}", [unit.text(predicted.get(key, 0.0)) for key in keys]),
        Column("off by", ratios),
        Column(f"in total\n{total.name}", totals, name="in total"),
    ]
    return FittingTable(
        "Actions: median of all micro-batches and steps",
        columns,
        notes=["In total: what the actions add to a step's work, measured minus predicted."],
    )


def _whole(trace: Trace) -> list[Timeline]:
    """Return the trace's steps with the plan's number of micro-batches."""
    return [step for step in trace.steps if step.schedule == trace.median.schedule]


def _medians(timelines: Sequence[Timeline]) -> dict[tuple[int, Kind], float]:
    """Return the median seconds of the actions of each stage and kind."""
    found: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for timeline in timelines:
        for row in zip(timeline.schedule.actions, timeline.starts, timeline.ends, strict=True):
            for action, start, end in zip(*row, strict=True):
                found[action.stage, action.kind].append(end - start)
    return {key: statistics.median(seconds) for key, seconds in found.items()}
