"""A plan in five lines."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..planning import Plan
from ..units import format_seconds
from .quantity import percent


def plan_summary(plan: Plan) -> Group:
    """The schedule, the predicted step against one device, the bubble and the bottleneck."""
    lines = [
        (
            "schedule",
            f"{plan.schedule}, {_count(plan.micro_batches, 'micro-batch', 'es')}, "
            f"{_count(len(plan.stages), 'stage')} on {_count(len(plan.cluster), 'device')}",
        )
    ]
    if plan.prediction is None:
        lines.append(("prediction", "none: the plan was written by hand"))
    else:
        lines += _prediction(plan)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(label, Text(value))
    return Group(Text("Plan", style="bold"), grid)


def _prediction(plan: Plan) -> list[tuple[str, str]]:
    predicted = plan.predicted
    loads = [stage.load_seconds for stage in plan.stages]
    speed_up = predicted.serial_seconds / predicted.step_seconds if predicted.step_seconds else 1.0
    cuts = (
        f"no cut of these layers into {len(loads)} stages on these devices has a smaller one"
        if len(loads) > 1
        else "one stage holds every layer"
    )
    return [
        ("step", f"{format_seconds(predicted.step_seconds)} predicted, forward and backward of a mini-batch"),
        (
            "speed-up",
            f"{speed_up:.2f}, against {format_seconds(predicted.serial_seconds)} "
            "for the same micro-batches on one device",
        ),
        ("bubble", f"{percent(predicted.bubble)} of the devices' time is idle"),
        (
            "bottleneck",
            f"stage {loads.index(max(loads))}, {format_seconds(predicted.bottleneck_seconds)} a micro-batch: {cuts}",
        ),
    ]


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
