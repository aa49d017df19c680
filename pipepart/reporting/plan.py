"""Shows a plan: a summary, its tables, and its predicted timeline."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

import schedules

from ..planning import Plan
from ..planning.costs.layer_ranges import TOLERANCE
from ..planning.pasting import as_options
from ..runtime.observe.trace import Trace
from ..units import counted, format_bytes, format_seconds
from .findings import findings
from .folding import FEWEST_ALIKE, fold
from .plan_tables import (
    alternatives_options,
    alternatives_table,
    borders_table,
    loaded_stages,
    memory_table,
    owned_stages,
    stage_numbers,
    stage_table,
)
from .quantity import longer, percent
from .table import labelled_lines
from .timeline import drawn_timeline

_SHOWN = 16  # names of devices
_Lines = list[tuple[str, str]]
_MOST_ROWS = 64  # devices, up to which all of them are shown


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
    if (borders := borders_table(plan)) is not None:
        reports.append(borders)
    if plan.prediction is not None and plan.alternatives:
        reports.append(alternatives_table(plan, compact))
        if not compact:
            reports.append(alternatives_options(plan))
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
    used, there = len(owned_stages(plan)), len(plan.cluster)
    devices = counted(there, "device") if used == there else f"{used} of {counted(there, 'device')}"
    replicas = (
        f", {plan.replicas} replicas with a share of the micro-batches each" if plan.replicas > 1 else ""
    )
    lines: _Lines = [
        (
            "schedule",
            f"{plan.schedule}, {counted(plan.micro_batches, 'micro-batch', 'es')}, "
            f"{counted(len(plan.stages), 'stage')} on {devices}{_per_device(plan)}{replicas}",
        )
    ]
    if asked := as_options(plan.constraints.given):
        lines.append(("request", asked))
    if plan.asynchronous:
        lines.append(("asynchronous", "weights change within the step: not the numbers of plain training"))
    if plan.compressed:
        lines.append(("compressed", plan.compressed))
    lines += [("queue", text) for text in plan.queues]
    lines += [*_order(plan), *_shared(plan)]
    if plan.prediction is None:
        lines.append(("prediction", "none: the plan was written by hand"))
    else:
        lines += _prediction(plan)
    return labelled_lines("Plan", lines)


def edited_note(in_file: Plan, fresh: Plan) -> Text | None:
    """Return a note on the figures of an edited plan file that were recomputed; None if none changed.

    Args:
        in_file: with the figures that the file has.
        fresh: with those that follow from its stages and the profile in it.
    """
    pairs = zip(in_file.stages, fresh.stages, strict=True)
    changed = [number for number, (before, after) in enumerate(pairs) if before != after]
    before, after = in_file.prediction, fresh.prediction
    if not changed and (before is None or after is None or before.step_seconds == after.step_seconds):
        return None
    text = f"The file was edited: the costs of {_stages(changed) or 'the schedule'} are computed again."
    if before is not None and after is not None:
        ratio = after.step_seconds / before.step_seconds if before.step_seconds else 1.0
        text += (
            f" The step takes {format_seconds(after.step_seconds)}, {longer(ratio, 'as before', 1)}: "
            f"the file had {format_seconds(before.step_seconds)}."
        )
    return Text(text)


def _stages(numbers: list[int], per_replica: int | None = None) -> str:
    if not numbers:
        return ""
    return f"stage{'s' if len(numbers) > 1 else ''} {stage_numbers(numbers, per_replica)}"


def _per_device(plan: Plan) -> str:
    """How many stages a device has, if some have several: a searched order may have other numbers on each."""
    counts = [len(numbers) for numbers in loaded_stages(plan).values()]
    fewest, most = min(counts), max(counts)
    if most == 1:
        return ""
    return f", {most} a device" if fewest == most else f", {fewest} to {most} a device"


def _order(plan: Plan) -> _Lines:
    """The order of the devices, if it is not the cluster's, and unused devices."""
    used = list(owned_stages(plan))
    names = [device.name for device in plan.cluster.devices]
    lines = []
    if used != [name for name in names if name in used]:
        lines.append(("order", f"{_few(used)} (the cluster lists them in another order)"))
    if unused := [name for name in names if name not in used]:
        lines.append(("unused", _few(_folded(unused))))
    return lines


def _folded(names: list[str]) -> list[str]:
    """Return the names, those of many devices that follow each other as one."""
    found = []
    for each in fold(names):
        own = names[each.first : each.first + each.layers]
        found += [each.label] if each.blocks >= FEWEST_ALIKE else own
    return found


def _few(names: Sequence[str]) -> str:
    """The names, or the first of many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shared(plan: Plan) -> _Lines:
    """Layers of different stages that share parameters."""
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    split = [
        f"{other!r} (stage {stage_of[other]}) and {info.name!r} (stage {stage_of[info.name]})"
        for info in (plan.profile.layers if plan.profile else ())
        for other in info.shares_with
        if stage_of[other] != stage_of[info.name]
    ]
    text = f"parameters or buffers of {', '.join(split)} are kept in sync; figures leave out the second copy"
    return [("shared", text)] if split else []


def _estimates(plan: Plan) -> _Lines:
    """What the times of the layers were estimated from, if they were not measured."""
    speed = plan.profile.roofline if plan.profile else None
    return [] if speed is None else [("times", f"estimated for {speed}; not measured")]


def _prediction(plan: Plan) -> _Lines:
    predicted, stages = plan.predicted, plan.all_stages
    speed_up = predicted.serial_seconds / predicted.step_seconds if predicted.step_seconds else 1.0
    (_, bottleneck), numbers = max(
        loaded_stages(plan).items(), key=lambda entry: sum(stages[number].load_seconds for number in entry[1])
    )
    return [
        ("step", f"{format_seconds(predicted.step_seconds)} predicted, {_throughput(plan)}"),
        *_estimates(plan),
        (
            "speed-up",
            f"{speed_up:.2f}, against {format_seconds(predicted.serial_seconds)} "
            "for the same micro-batches on one device",
        ),
        *_split_critical(plan),
        ("bubble", f"{percent(predicted.bubble)} of the devices' time is idle"),
        ("memory", _memory(plan)),
        *_recompute(plan),
        *_offload(plan),
        (
            "bottleneck",
            f"{_stages(numbers, len(plan.stages))} on {bottleneck}, "
            f"{format_seconds(predicted.bottleneck_seconds)} per micro-batch",
        ),
        ("cut", _proof_of_cut(plan)),
        *_proof_of_step(plan),
        *_search_end(plan),
    ]


def _throughput(plan: Plan) -> str:
    """Samples per second; without a profile the size of the mini-batch is not known."""
    if plan.profile is None or not plan.predicted.step_seconds:
        return "forward and backward of a mini-batch"
    batch = plan.profile.batch
    rate = batch / plan.predicted.step_seconds
    return f"{rate:,.{0 if rate >= 100 else 1}f} samples per second in mini-batches of {batch:,}"


def _split_critical(plan: Plan) -> _Lines:
    """The number of backwards on the critical path that are split into I and W, and the time that saves."""
    if not plan.split_critical:
        return []
    full = plan.model_copy(update={"split_critical": ()}).simulate().makespan
    text = (
        f"{counted(len(plan.split_critical), 'backward')} on the critical path split into input and weight "
        f"gradients: {format_seconds(full - plan.predicted.step_seconds)} less"
    )
    return [("split", text)]


def _memory(plan: Plan) -> str:
    """Describe the device that uses the largest fraction of its limit, or the most bytes if there are no limits."""
    needs = plan.device_bytes()
    limits = {name: plan.cluster.device(name).memory_bytes for name in needs}
    parts = {name: needs[name] / limit for name, limit in limits.items() if limit}
    if not parts:
        name = max(needs, key=lambda name: needs[name])
        return f"{format_bytes(needs[name])} at most, on {name}"
    name = max(parts, key=lambda name: parts[name])
    need, limit = format_bytes(needs[name]), format_bytes(limits[name] or 0)
    if parts[name] > 1:
        return f"does not fit: {name} needs {need} and has {limit}"
    free = format_bytes((limits[name] or 0) - needs[name])
    return f"fits: the fullest device is {name}, {need} of {limit} ({percent(parts[name])}), {free} free"


def _offload(plan: Plan) -> _Lines:
    """The stages that offload, with the bytes and seconds of their copies."""
    numbers = [number for number, stage in enumerate(plan.stages) if stage.mode == "offload"]
    if not numbers:
        return []
    stages, costs = [plan.stages[number] for number in numbers], plan.stage_costs()
    moved = max(stage.stash_bytes - stage.boundary_bytes for stage in stages)
    slowest = max(costs.host_copy[number] + costs.offload[number] for number in numbers)
    which = f"{'stage' if len(numbers) == 1 else 'stages'} {', '.join(map(str, numbers))}"
    text = (
        f"{which}: up to {format_bytes(moved)} of a micro-batch go to the host and back, "
        f"{format_seconds(slowest)} each way beside the computation"
    )
    return [("offload", text)]


def _recompute(plan: Plan) -> _Lines:
    """The stages that recompute, with the seconds that it costs and the bytes that it saves."""
    numbers = [number for number, stage in enumerate(plan.stages) if stage.recompute != "never"]
    if not numbers:
        return []
    stages = [plan.stages[number] for number in numbers]
    cost = sum(stage.recompute_seconds for stage in stages)
    saved = sum(
        (stage.in_flight - stage.deferred_weight_grads - stage.full_stashes) * stage.stash_bytes
        - stage.input_only * stage.boundary_bytes
        for stage in stages
    )
    text = (
        f"{_stages(numbers)}: {format_seconds(cost)} more per micro-batch, {format_bytes(saved)} less stash"
    )
    return [("recompute", text)]


def _proof_of_cut(plan: Plan) -> str:
    """Say whether a cut with a smaller bottleneck can exist."""
    predicted, stages = plan.predicted, len(plan.stages)
    if stages == 1:
        return "one stage holds every layer"
    if predicted.bottleneck_optimal:
        return f"proven: no allowed cut into {stages} stages that fits has a smaller bottleneck"
    if not predicted.bottleneck_bound:
        return "its bottleneck is not proven to be the smallest"
    above = predicted.bottleneck_seconds / predicted.bottleneck_bound - 1
    return f"its bottleneck is at most {above:.1%} above the smallest for {stages} stages on these devices"


def _proof_of_step(plan: Plan) -> _Lines:
    """Say what is proven of the step: for all plans, and for all orders of this plan's actions."""
    if not plan.step_bound:
        return []
    replicas = f" and {plan.replicas} replicas" if plan.replicas > 1 else ""
    count = counted(plan.micro_batches, "micro-batch", "es")
    there = len(plan.cluster)
    devices = "this device" if there == 1 else f"these {there} devices"
    any_plan = f"no plan on {devices} with {count}{replicas}"
    if plan.step_gap < TOLERANCE:
        return [("bound", f"proven: {any_plan} has a shorter step")]
    text = (
        f"proven: {any_plan} takes less than {format_seconds(plan.step_bound)}; "
        f"this step is at most {plan.step_gap:.1%} above that bound"
    )
    if (order := _order_bound(plan)) > plan.step_bound * (1 + TOLERANCE):
        above = plan.predicted.step_seconds / order - 1
        mine = f"at most {above:.1%} above" if above >= TOLERANCE else "equal to"
        text += f", and {mine} the shortest with these stages"
    return [("bound", text)]


def _search_end(plan: Plan) -> _Lines:
    """Say if the search had more to try."""
    if not plan.out_of_time:
        return []
    return [("search", "its time was up before it ended: with more seconds it may find a shorter step")]


def _order_bound(plan: Plan) -> float:
    """Seconds that no order of the actions of these stages on these devices can beat; 0 if unknown."""
    schedule = plan.build_schedule()
    if schedule.replicas > 1 or schedule.versions:
        return 0.0
    return schedules.bound(
        plan.stage_costs(), schedule.devices, schedule.micro_batches, placement=schedule.device_of
    )
