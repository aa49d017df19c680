"""Summary of a plan: schedule, step time, bubble, memory, bottleneck, and what is proven."""

from __future__ import annotations

from rich.console import Group

from ...planning import Plan
from ...units import counted, format_bytes, format_seconds
from ..kit.labels import labelled_lines
from ..kit.quantity import percent
from .stage_names import loaded_stages, owned_stages, stage_numbers


def plan_summary(plan: Plan) -> Group:
    """The schedule, the predicted step against one device, the bubble, the memory and the bottleneck."""
    chunks = f", {plan.chunks} a device" if plan.chunks > 1 else ""
    lines = [
        (
            "schedule",
            f"{plan.schedule}, {counted(plan.micro_batches, 'micro-batch', 'es')}, "
            f"{counted(len(plan.stages), 'stage')} on {_devices(plan)}{chunks}{_replicas(plan)}",
        )
    ]
    if plan.asynchronous:
        lines.append(("asynchronous", "weights change within the step: not the numbers of plain training"))
    lines += _order(plan) + _shared(plan)
    if plan.prediction is None:
        lines.append(("prediction", "none: the plan was written by hand"))
    else:
        lines += _prediction(plan)
    return labelled_lines("Plan", lines)


def _devices(plan: Plan) -> str:
    used, there = len(owned_stages(plan)), len(plan.cluster)
    return counted(there, "device") if used == there else f"{used} of {counted(there, 'device')}"


def _replicas(plan: Plan) -> str:
    return f", {plan.replicas} replicas with a share of the micro-batches each" if plan.replicas > 1 else ""


def _order(plan: Plan) -> list[tuple[str, str]]:
    """The order of the devices, if it is not the cluster's, and unused devices."""
    used = list(owned_stages(plan))
    names = [device.name for device in plan.cluster.devices]
    lines = []
    if used != [name for name in names if name in used]:
        lines.append(("order", f"{', '.join(used)}: not the order of the cluster"))
    if unused := [name for name in names if name not in used]:
        lines.append(("unused", ", ".join(unused)))
    return lines


def _shared(plan: Plan) -> list[tuple[str, str]]:
    """Layers of different stages that share parameters."""
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    parted = [
        f"{other!r} (stage {stage_of[other]}) and {info.name!r} (stage {stage_of[info.name]})"
        for info in (plan.profile.layers if plan.profile else ())
        for other in info.shares_with
        if stage_of[other] != stage_of[info.name]
    ]
    if not parted:
        return []
    return [
        (
            "shared",
            f"parameters or buffers of {', '.join(parted)} are kept in sync; figures leave out the second copy",
        )
    ]


def _prediction(plan: Plan) -> list[tuple[str, str]]:
    predicted = plan.predicted
    speed_up = predicted.serial_seconds / predicted.step_seconds if predicted.step_seconds else 1.0
    return [
        ("step", f"{format_seconds(predicted.step_seconds)} predicted, forward and backward of a mini-batch"),
        (
            "speed-up",
            f"{speed_up:.2f}, against {format_seconds(predicted.serial_seconds)} "
            "for the same micro-batches on one device",
        ),
        *_split_critical(plan),
        ("bubble", f"{percent(predicted.bubble)} of the devices' time is idle"),
        ("memory", _memory(plan)),
        *_recompute(plan),
        (
            "bottleneck",
            f"{_bottleneck(plan)}, {format_seconds(predicted.bottleneck_seconds)} per micro-batch",
        ),
        ("cut", _proof(plan)),
    ]


def _split_critical(plan: Plan) -> list[tuple[str, str]]:
    """Describe the number of backwards on the critical path that are split into I and W, and the time it saves."""
    if not plan.split_critical:
        return []
    full = plan.model_copy(update={"split_critical": ()}).simulate().makespan
    return [
        (
            "split",
            f"{counted(len(plan.split_critical), 'backward')} on the critical path split into input and weight "
            f"gradients: {format_seconds(full - plan.predicted.step_seconds)} less",
        )
    ]


def _memory(plan: Plan) -> str:
    """Describe the device that uses the largest fraction of its limit, or the most bytes if there are no limits."""
    needs = plan.device_bytes()
    limits = {name: plan.cluster.device(name).memory_bytes for name in needs}
    parts = {name: needs[name] / limit for name, limit in limits.items() if limit}
    if not parts:
        name = max(needs, key=lambda name: needs[name])
        return f"{format_bytes(needs[name])} at most, on {name}"
    name = max(parts, key=lambda name: parts[name])
    limit = limits[name] or 0
    return (
        f"fits: the fullest device is {name}, {format_bytes(needs[name])} of {format_bytes(limit)} "
        f"({percent(parts[name])})"
        if parts[name] <= 1
        else f"does not fit: {name} needs {format_bytes(needs[name])} and has {format_bytes(limit)}"
    )


def _recompute(plan: Plan) -> list[tuple[str, str]]:
    """Describe the stages that recompute, with the seconds that it costs and the bytes that it saves."""
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
    return [
        (
            "recompute",
            f"stage{'s' if len(numbers) > 1 else ''} {stage_numbers(numbers)}: {format_seconds(cost)} more per "
            f"micro-batch, {format_bytes(saved)} less stash",
        )
    ]


def _bottleneck(plan: Plan) -> str:
    stages = plan.all_stages
    (_, name), numbers = max(
        loaded_stages(plan).items(), key=lambda entry: sum(stages[number].load_seconds for number in entry[1])
    )
    return f"stage{'s' if len(numbers) > 1 else ''} {stage_numbers(numbers, len(plan.stages))} on {name}"


def _proof(plan: Plan) -> str:
    """Return a sentence on whether a cut with a smaller bottleneck can exist."""
    predicted, stages = plan.predicted, len(plan.stages)
    if stages == 1:
        return "one stage holds every layer"
    if predicted.optimal:
        return f"proven optimal: no allowed cut into {stages} stages that fits has a smaller bottleneck"
    if not predicted.bottleneck_bound:
        return "not compared with other cuts"
    above = predicted.bottleneck_seconds / predicted.bottleneck_bound - 1
    return f"bottleneck at most {above:.1%} above the optimum for {stages} stages on these devices"
