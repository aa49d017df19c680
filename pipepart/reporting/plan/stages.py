"""Table of the time that one micro-batch takes in each stage and on each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...planning import Plan, StagePlan
from ..kit.quantity import NONE, TimeUnit, bar, percent
from ..kit.table import Column, FittingTable
from .stage_names import loaded_stages, span, stage_numbers


def stage_table(plan: Plan) -> FittingTable:
    """Make a table with one row per stage and, if devices have several stages, one per device below."""
    stages, loaded = plan.all_stages, loaded_stages(plan)
    sums = list(loaded) if plan.chunks > 1 else []
    loads = [_sum(stages, numbers, lambda stage: stage.load_seconds) for numbers in loaded.values()]
    bottleneck = max(loads)
    unit = TimeUnit.for_all(loads)
    shares = [load / bottleneck if bottleneck else 0.0 for load in loads]
    count = len(plan.stages)
    places = [divmod(number, count) for number in range(len(stages))]
    blank = [""] * len(stages) if sums else []

    def times(header: str, part: str, rank: int = 0) -> Column:
        def of(stage: StagePlan) -> float:
            return getattr(stage, part)

        cells = [unit.text(of(stage)) for stage in stages]
        return Column(
            f"{header}\n{unit.name}",
            [*cells, *(unit.text(_sum(stages, loaded[one], of)) for one in sums)],
            rank,
        )

    again = any(stage.recompute != "never" for stage in stages)
    return FittingTable(
        "Stages: time for one micro-batch",
        [
            Column(
                "stage",
                [
                    *(str(stage) for _, stage in places),
                    *(stage_numbers(loaded[one], count) for one in sums),
                ],
            ),
            *(
                [Column("replica", [str(replica) for replica, _ in [*places, *sums]])]
                if plan.replicas > 1
                else []
            ),
            Column(
                "device", [*(stage.device for stage in stages), *(device for _, device in sums)], text=True
            ),
            Column("layers", [*(span(stage.layers) for stage in stages), *("" for _ in sums)], text=True),
            Column(
                "count",
                [
                    str(round(_sum(stages, numbers, lambda stage: len(stage.layers))))
                    for numbers in [
                        *([number] for number in range(len(stages))),
                        *(loaded[one] for one in sums),
                    ]
                ],
                rank=3,
            ),
            times("forward", "forward_seconds"),
            times("backward\ninput", "backward_input_seconds"),
            times("backward\nweight", "backward_weight_seconds"),
            *([times("recompute", "recompute_seconds")] if again else []),
            times("transfer", "transfer_seconds", rank=4),
            times("load", "load_seconds"),
            Column("share", [*blank, *map(percent, shares)], 1, name="share of the bottleneck"),
            Column("", [*blank, *map(bar, shares)], rank=2, text=True, style="cyan"),
        ],
        totals=len(sums),
        notes=[
            "Load: the sum. Share: of the bottleneck, the largest load of any device.",
            *([_again_note(plan)] if again else []),
        ],
    )


def _sum(stages: Sequence[StagePlan], numbers: Sequence[int], part: Callable[[StagePlan], float]) -> float:
    return sum(part(stages[number]) for number in numbers)


def _again_note(plan: Plan) -> str:
    modes = {stage.recompute for stage in plan.stages} - {"never"}
    which = "all but the last micro-batch" if modes == {"except-last"} else "every micro-batch"
    if len(modes) > 1:
        which = "the micro-batches (in some stages, all but the last)"
    return f"Recompute: the forward runs again right before the backward of {which}. {NONE}: not recomputed."
