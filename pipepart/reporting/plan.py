"""Shows a plan: a summary, its tables, and its predicted timeline."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ..planning import Plan
from ..planning.costs.layer_ranges import TOLERANCE
from ..planning.pasting import as_options
from ..runtime.observe.trace import Trace
from ..units import counted, format_bytes, format_seconds
from .findings import findings
from .plan_tables import alternatives_table, few, memory_table, owned_stages, stage_numbers, stage_table
from .quantity import percent
from .table import labelled_lines
from .timeline import drawn_timeline

_MOST_NAMES = 16  # of devices in a line
_MOST_ROWS = 64  # devices, up to which all of them are shown
_Lines = list[tuple[str, str]]


def plan_reports(plan: Plan, compact: bool = False, trace: Trace | None = None) -> list[RenderableType]:
    """Return the findings, summary, tables and timeline of a plan; a plan written by hand has fewer.

    Args:
        plan: the plan to show.
        compact: show only some of the alternatives.
        trace: measured steps of it, which the findings take into account.
    """
    shown = plan if len(plan.cluster) <= _MOST_ROWS else plan.first_replica
    reports: list[RenderableType] = [
        *findings_report(plan, trace),
        plan_summary(plan),
        stage_table(shown),
        memory_table(shown),
    ]
    if shown is not plan:
        reports.append("Only the first replica is shown, with the step that it would have alone.")
    if plan.prediction is not None and plan.alternatives:
        reports.append(alternatives_table(plan, compact))
    if any(stage.load_seconds for stage in plan.stages):
        names = [device.name for device in shown.workers]
        reports.append(drawn_timeline(shown.simulate(), "Predicted timeline of one step", names))
    return reports


def findings_report(plan: Plan, trace: Trace | None = None) -> list[RenderableType]:
    """Return the findings under a title; an empty list for a plan without a profile."""
    said = findings(plan, trace)
    return [Group(Text("What limits the step", style="bold"), *map(Text, said))] if said else []


def plan_summary(plan: Plan) -> Group:
    """Summarise a plan: schedule, predicted step and speed-up, bubble, memory, bottleneck and optimality."""
    there, unused = len(plan.cluster), plan.unused_devices
    devices = f"{there - len(unused)} of {counted(there, 'device')}" if unused else counted(there, "device")
    replicas = (
        f", {plan.replicas} replicas with a share of the micro-batches each" if plan.replicas > 1 else ""
    )
    lines: _Lines = [
        (
            "schedule",
            f"{plan.schedule}, {counted(plan.micro_batches, 'micro-batch', 'es')}, "
            f"{counted(len(plan.stages), 'stage')} on {devices}{replicas}",
        )
    ]
    if asked := as_options(plan.constraints.given):
        lines.append(("request", asked))
    if plan.asynchronous:
        lines.append(("asynchronous", "weights change within the step: not the numbers of plain training"))
    if plan.compressed:
        lines.append(("compressed", plan.compressed))
    lines += [("inside", text) for text in plan.inside]
    lines += [("queue", text) for text in plan.queues]
    if unused:
        lines.append(("unused", few(unused, _MOST_NAMES)))
    if shared := _shared(plan):
        names = few(shared, _MOST_NAMES)
        lines.append(("shared", f"{names} share parameters or buffers; figures leave out the second copy"))
    if plan.prediction is None:
        lines.append(("prediction", "none: the plan was written by hand"))
    else:
        lines += _prediction(plan)
    return labelled_lines("Plan", lines)


def _shared(plan: Plan) -> list[str]:
    """Return the layers that share parameters with a layer of another stage, with their stages."""
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    return [
        f"{other!r} (stage {stage_of[other]}) and {info.name!r} (stage {stage_of[info.name]})"
        for info in (plan.profile.layers if plan.profile else ())
        for other in info.shares_with
        if stage_of[other] != stage_of[info.name]
    ]


def _prediction(plan: Plan) -> _Lines:
    predicted, speed = plan.predicted, plan.profile.roofline if plan.profile else None
    speed_up = predicted.serial_seconds / predicted.step_seconds if predicted.step_seconds else 1.0
    modes = {"recompute": _stages_in(plan, "recompute"), "offload": _stages_in(plan, "offload")}
    return [
        ("step", f"{format_seconds(predicted.step_seconds)} predicted, {_throughput(plan)}"),
        *([("times", f"estimated for {speed}; not measured")] if speed else []),
        (
            "speed-up",
            f"{speed_up:.2f}, against {format_seconds(predicted.serial_seconds)} "
            "for the same micro-batches on one device",
        ),
        ("bubble", f"{percent(predicted.bubble)} of the devices' time is idle"),
        ("memory", _memory(plan)),
        *(
            (mode, f"{'stages' if ',' in which else 'stage'} {which}")
            for mode, which in modes.items()
            if which
        ),
        ("bottleneck", _bottleneck(plan)),
        *_proofs(plan),
    ]


def _throughput(plan: Plan) -> str:
    """Samples per second; without a profile the size of the mini-batch is not known."""
    if plan.profile is None or not plan.predicted.step_seconds:
        return "forward and backward of a mini-batch"
    batch = plan.profile.batch
    rate = batch / plan.predicted.step_seconds
    return f"{rate:,.{0 if rate >= 100 else 1}f} samples per second in mini-batches of {batch:,}"


def _memory(plan: Plan) -> str:
    """Describe the device that uses the largest fraction of its limit, or the most bytes if there are no limits."""
    needs = plan.device_bytes()
    limits = {name: plan.cluster.device(name).memory_bytes for name in needs}
    parts = {name: needs[name] / limit for name, limit in limits.items() if limit}
    if not parts:
        name = max(needs, key=lambda name: needs[name])
        return f"{format_bytes(needs[name])} at most, on {name}"
    name = max(parts, key=lambda name: parts[name])
    verdict = "fits" if parts[name] <= 1 else "does not fit"
    limit = format_bytes(limits[name] or 0)
    return f"{verdict}: {name} needs most, {format_bytes(needs[name])} of {limit} ({percent(parts[name])})"


def _stages_in(plan: Plan, mode: str) -> str:
    """Return the numbers of the stages that recompute or offload."""
    return stage_numbers(
        [number for number, stage in enumerate(plan.stages) if getattr(stage, mode) != "never"]
    )


def _bottleneck(plan: Plan) -> str:
    """Name the device with the largest load."""
    stages = plan.all_stages
    device, numbers = max(
        owned_stages(plan).items(), key=lambda entry: sum(stages[number].load_seconds for number in entry[1])
    )
    return (
        f"stage{'s' if len(numbers) > 1 else ''} {stage_numbers(numbers, len(plan.stages))} on {device}, "
        f"{format_seconds(plan.predicted.bottleneck_seconds)} per micro-batch"
    )


def _proofs(plan: Plan) -> _Lines:
    """Say what is proven of the cut and of the step, and whether the search had more to try."""
    predicted, stages = plan.predicted, len(plan.stages)
    lines = []
    if predicted.bottleneck_optimal and stages > 1:
        text = f"proven: no allowed cut into {stages} stages that fits has a smaller bottleneck"
        lines.append(("cut", text))
    elif predicted.bottleneck_bound and stages > 1:
        above = predicted.bottleneck_seconds / predicted.bottleneck_bound - 1
        text = (
            f"its bottleneck is at most {above:.1%} above the smallest for {stages} stages on these devices"
        )
        lines.append(("cut", text))
    if plan.step_bound:
        replicas = f" and {plan.replicas} replicas" if plan.replicas > 1 else ""
        count = counted(plan.micro_batches, "micro-batch", "es")
        text = f"proven: no plan on these devices with {count}{replicas} "
        if plan.step_gap < TOLERANCE:
            text += "has a shorter step"
        else:
            least = format_seconds(plan.step_bound)
            text += f"takes less than {least}; this step is at most {plan.step_gap:.1%} above that"
        lines.append(("bound", text))
    if plan.out_of_time:
        text = "its time was up before it ended: with more seconds it may find a shorter step"
        lines.append(("search", text))
    return lines
