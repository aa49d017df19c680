"""A plan in a few lines: what it is, how long it takes, whether it fits, and how good it is known to be."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..planning import Plan
from ..units import counted, format_bytes, format_seconds
from .owners import copies, loaded_stages, owned_stages, stage_numbers
from .quantity import percent


def plan_summary(plan: Plan) -> Group:
    """The schedule, the predicted step against one device, the bubble, the memory and the bottleneck."""
    chunks = f", {plan.chunks} a device" if plan.chunks > 1 else ""
    lines = [
        (
            "schedule",
            f"{plan.schedule}, {counted(plan.micro_batches, 'micro-batch', 'es')}, "
            f"{counted(len(plan.stages), 'stage')} on {_devices(plan)}{chunks}{_copies(plan)}",
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


def labelled_lines(title: str, lines: list[tuple[str, str]]) -> Group:
    """A title over lines of a label and a text each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(label, Text(value))
    return Group(Text(title, style="bold"), grid)


def _devices(plan: Plan) -> str:
    used, there = len(owned_stages(plan)), len(plan.cluster)
    return counted(there, "device") if used == there else f"{used} of {counted(there, 'device')}"


def _copies(plan: Plan) -> str:
    """Where there are some: micro-batches are shared out among them."""
    count = copies(plan)
    return f", {count} copies of the model with a share of the micro-batches each" if count > 1 else ""


def _order(plan: Plan) -> list[tuple[str, str]]:
    """The devices along the model, where they stand there in another order than in the cluster, or not all."""
    used = list(owned_stages(plan))
    names = [device.name for device in plan.cluster.devices]
    lines = []
    if used != [name for name in names if name in used]:
        lines.append(("order", f"{', '.join(used)} along the model, not as the cluster lists them"))
    if unused := [name for name in names if name not in used]:
        lines.append(("unused", ", ".join(unused)))
    return lines


def _shared(plan: Plan) -> list[tuple[str, str]]:
    """Layers of different stages that share parameters, as only in a plan that was edited."""
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
            f"parameters or buffers of {', '.join(parted)}: a copy on the later one, which no figure counts",
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
        *_early(plan),
        ("bubble", f"{percent(predicted.bubble)} of the devices' time is idle"),
        ("memory", _memory(plan)),
        *_again(plan),
        ("bottleneck", f"{_bottleneck(plan)}, {format_seconds(predicted.bottleneck_seconds)} a micro-batch"),
        ("cut", _proof(plan)),
    ]


def _early(plan: Plan) -> list[tuple[str, str]]:
    """How many backwards pass their gradient on before they are done, and what that gains."""
    if not plan.split_critical:
        return []
    count, plain = (
        len(plan.split_critical),
        plan.model_copy(update={"split_critical": ()}).simulate().makespan,
    )
    passes = "passes its" if count == 1 else "pass their"
    of = "its" if count == 1 else "their"
    return [
        (
            "early",
            f"{counted(count, 'backward')} {passes} gradient on before {of} weights' are computed: "
            f"{format_seconds(plain - plan.predicted.step_seconds)} less",
        )
    ]


def _memory(plan: Plan) -> str:
    """The device that is fullest, by its limit where there are limits."""
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


def _again(plan: Plan) -> list[tuple[str, str]]:
    """Which stages run their forward again, what that costs, and what it saves."""
    again = [number for number, stage in enumerate(plan.stages) if stage.recompute != "never"]
    if not again:
        return []
    stages = [plan.stages[number] for number in again]
    cost = sum(stage.recompute_seconds for stage in stages)
    saved = sum(
        (stage.in_flight - stage.deferred_weight_grads - stage.full_stashes) * stage.stash_bytes
        - stage.input_only * stage.boundary_bytes
        for stage in stages
    )
    whose = f"stage{'s' if len(again) > 1 else ''} {stage_numbers(again)}"
    return [
        (
            "recompute",
            f"{whose} run{'' if len(again) > 1 else 's'} the forward again: {format_seconds(cost)} more a micro-batch, "
            f"{format_bytes(saved)} less held",
        )
    ]


def _bottleneck(plan: Plan) -> str:
    stages = plan.all_stages
    (_, name), numbers = max(
        loaded_stages(plan).items(), key=lambda entry: sum(stages[number].load_seconds for number in entry[1])
    )
    return f"stage{'s' if len(numbers) > 1 else ''} {stage_numbers(numbers, len(plan.stages))} on {name}"


def _proof(plan: Plan) -> str:
    """What is known of other cuts."""
    predicted, stages = plan.predicted, len(plan.stages)
    if stages == 1:
        return "one stage holds every layer"
    if predicted.optimal:
        return f"proven: no cut into {stages} stages that is allowed and fits these devices has a smaller bottleneck"
    if not predicted.bottleneck_bound:
        return "how far its bottleneck is from the smallest is not known"
    above = predicted.bottleneck_seconds / predicted.bottleneck_bound - 1
    return f"its bottleneck may be up to {above:.1%} above the smallest of {stages} stages on these devices"
