"""What each stage of a plan holds and costs, as a table."""

from __future__ import annotations

from ..planning import Plan
from .fitting import Column, FittingTable
from .quantity import NONE, TimeUnit, bar, percent, size


def stage_table(plan: Plan) -> FittingTable:
    """One row a stage: its device, its layers, what a micro-batch costs it, and its memory."""
    stages = plan.stages
    bottleneck = max(stage.load_seconds for stage in stages)
    unit = TimeUnit.for_all(stage.load_seconds for stage in stages)
    shares = [stage.load_seconds / bottleneck if bottleneck else 0.0 for stage in stages]
    limits = [device.memory_bytes for device in plan.devices]

    def times(header: str, part: str, rank: int = 0) -> Column:
        return Column(f"{header}\n{unit.name}", [unit.text(getattr(stage, part)) for stage in stages], rank)

    memory = [
        Column("state", [size(stage.static_bytes) for stage in stages], rank=4),
        Column(
            "in flight\n× stash",
            [f"{stage.in_flight} × {size(stage.stash_bytes)}" for stage in stages],
            rank=4,
        ),
        Column("for a\nwhile", [size(stage.transient_bytes) for stage in stages], rank=4),
        Column("memory", [size(stage.memory_bytes) for stage in stages]),
    ]
    if any(limits):
        memory.append(
            Column(
                "of",
                [
                    f"{size(limit)} {percent(stage.memory_bytes / limit):>4}" if limit else NONE
                    for stage, limit in zip(stages, limits, strict=True)
                ],
                rank=3,
                name="the device's limit",
            )
        )
    return FittingTable(
        "Stages: one micro-batch",
        [
            Column("stage", [str(index) for index in range(len(stages))]),
            Column("device", [stage.device for stage in stages], text=True),
            Column("layers", [_span(stage.layers) for stage in stages], text=True),
            Column("count", [str(len(stage.layers)) for stage in stages], rank=2),
            times("forward", "forward_seconds"),
            times("backward\ninput", "backward_input_seconds"),
            times("backward\nweight", "backward_weight_seconds"),
            times("transfer", "transfer_seconds", rank=5),
            times("load", "load_seconds"),
            Column("share", [percent(share) for share in shares], rank=1, name="share of the bottleneck"),
            Column("", [bar(share) for share in shares], rank=1, text=True, style="cyan"),
            *memory,
        ],
        notes=[
            "Load: all that a micro-batch costs the stage; share: of the largest load. "
            "State: parameters, gradients, optimizer."
        ],
    )


def _span(layers: tuple[str, ...]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} – {layers[-1]}"
