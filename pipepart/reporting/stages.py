"""What a micro-batch costs each stage of a plan, and each device, as a table."""

from __future__ import annotations

from collections.abc import Callable

from ..planning import Plan, StagePlan
from .fitting import Column, FittingTable
from .owners import owned_stages, span, stage_numbers
from .quantity import NONE, TimeUnit, bar, percent


def stage_table(plan: Plan) -> FittingTable:
    """One row a stage: its device, its layers, and what a micro-batch costs it; with chunks, one a device below."""
    stages, owned = plan.stages, owned_stages(plan)
    sums = list(owned) if plan.chunks > 1 else []
    loads = {
        device: _sum(plan, numbers, lambda stage: stage.load_seconds) for device, numbers in owned.items()
    }
    bottleneck = max(loads.values())
    unit = TimeUnit.for_all(loads.values())
    shares = [loads[device] / bottleneck if bottleneck else 0.0 for device in owned]
    blank = [""] * len(stages) if sums else []

    def times(header: str, part: str, rank: int = 0) -> Column:
        def of(stage: StagePlan) -> float:
            return getattr(stage, part)

        cells = [unit.text(of(stage)) for stage in stages]
        return Column(
            f"{header}\n{unit.name}", [*cells, *(unit.text(_sum(plan, owned[one], of)) for one in sums)], rank
        )

    again = any(stage.recompute != "never" for stage in stages)
    return FittingTable(
        "Stages: time for one micro-batch",
        [
            Column(
                "stage", [*map(str, range(len(stages))), *(stage_numbers(owned[device]) for device in sums)]
            ),
            Column("device", [*(stage.device for stage in stages), *sums], text=True),
            Column("layers", [*(span(stage.layers) for stage in stages), *("" for _ in sums)], text=True),
            Column(
                "count",
                [str(round(_sum(plan, numbers, lambda stage: len(stage.layers)))) for numbers in _rows(plan)],
                rank=3,
            ),
            times("forward", "forward_seconds"),
            times("backward\ninput", "backward_input_seconds"),
            times("backward\nweight", "backward_weight_seconds"),
            *([times("forward\nagain", "recompute_seconds")] if again else []),
            times("transfer", "transfer_seconds", rank=4),
            times("load", "load_seconds"),
            Column("share", [*blank, *map(percent, shares)], 1, name="share of the bottleneck"),
            Column("", [*blank, *map(bar, shares)], rank=2, text=True, style="cyan"),
        ],
        totals=len(sums),
        notes=[
            "Load: all of it; share: of the largest load of a device, the bottleneck.",
            *([_again_note(plan)] if again else []),
        ],
    )


def _rows(plan: Plan) -> list[list[int]]:
    """The stages that each row is about."""
    single = [[number] for number in range(len(plan.stages))]
    return [*single, *owned_stages(plan).values()] if plan.chunks > 1 else single


def _sum(plan: Plan, numbers: list[int], part: Callable[[StagePlan], float]) -> float:
    return sum(part(plan.stages[number]) for number in numbers)


def _again_note(plan: Plan) -> str:
    modes = {stage.recompute for stage in plan.stages} - {"never"}
    which = "all but the last micro-batch" if modes == {"except-last"} else "every micro-batch"
    if len(modes) > 1:
        which = "the micro-batches (in some stages, all but the last)"
    return f"Forward again: right before the backward of {which}, to save memory; {NONE}: kept instead."
