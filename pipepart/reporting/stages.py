"""What each stage of a plan costs and holds, as two tables."""

from __future__ import annotations

from ..planning import Plan
from .fitting import Column, FittingTable
from .quantity import NONE, TimeUnit, bar, percent, size


def stage_table(plan: Plan) -> FittingTable:
    """One row a stage: its device, its layers, and what a micro-batch costs it."""
    stages = plan.stages
    bottleneck = max(stage.load_seconds for stage in stages)
    unit = TimeUnit.for_all(stage.load_seconds for stage in stages)
    shares = [stage.load_seconds / bottleneck if bottleneck else 0.0 for stage in stages]

    def times(header: str, part: str, rank: int = 0) -> Column:
        return Column(f"{header}\n{unit.name}", [unit.text(getattr(stage, part)) for stage in stages], rank)

    return FittingTable(
        "Stages: time for one micro-batch",
        [
            *_who(plan),
            Column("layers", [_span(stage.layers) for stage in stages], text=True),
            Column("count", [str(len(stage.layers)) for stage in stages], rank=2),
            times("forward", "forward_seconds"),
            times("backward\ninput", "backward_input_seconds"),
            times("backward\nweight", "backward_weight_seconds"),
            times("transfer", "transfer_seconds", rank=3),
            times("load", "load_seconds"),
            Column("share", [percent(share) for share in shares], name="share of the bottleneck"),
            Column("", [bar(share) for share in shares], rank=1, text=True, style="cyan"),
        ],
        notes=["Load: all of it; share: of the largest load, the bottleneck."],
    )


def memory_table(plan: Plan) -> FittingTable:
    """One row a stage: the most that it holds at once, and what its device has."""
    stages = plan.stages
    limits = [device.memory_bytes for device in plan.devices]
    columns = [
        *_who(plan),
        Column("parameters,\noptimizer", [size(stage.static_bytes) for stage in stages]),
        Column(
            "in flight\n× stash",
            [
                f"{stage.in_flight} × {size(stage.stash_bytes)}" if stage.stash_bytes else NONE
                for stage in stages
            ],
        ),
        Column("for a\nwhile", [size(stage.transient_bytes) for stage in stages]),
        Column("together", [size(stage.memory_bytes) for stage in stages], style="bold"),
    ]
    if any(limits):
        parts = [
            stage.memory_bytes / limit if limit else 0.0 for stage, limit in zip(stages, limits, strict=True)
        ]
        columns += [
            Column("limit", [size(limit) if limit else "none" for limit in limits]),
            Column("used", [percent(part) for part in parts]),
            Column("", [bar(part) for part in parts], rank=1, text=True, style="cyan"),
        ]
    return FittingTable(
        "Stages: memory",
        columns,
        notes=["Stash: what one micro-batch in flight keeps for its backward."],
    )


def _who(plan: Plan) -> list[Column]:
    return [
        Column("stage", [str(index) for index in range(len(plan.stages))]),
        Column("device", [stage.device for stage in plan.stages], text=True),
    ]


def _span(layers: tuple[str, ...]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} – {layers[-1]}"
