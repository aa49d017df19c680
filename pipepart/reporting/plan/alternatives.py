"""Table of the alternatives to a plan, and why they lost."""

from __future__ import annotations

from ...planning import Alternative, Plan
from ..kit.quantity import NONE, TimeUnit, size
from ..kit.table import Column, FittingTable


def alternatives_table(plan: Plan, compact: bool = False) -> FittingTable:
    """Make a table of the plan and its alternatives, fastest first.

    Args:
        plan: with a prediction.
        compact: show only the best of each schedule that fits.
    """
    predicted = plan.predicted
    shown = _best_of_each(plan) if compact else plan.alternatives
    step = [predicted.step_seconds, *(other.step_seconds for other in shown)]
    memory = [max(predicted.memory_bytes), *(other.memory_bytes for other in shown)]
    unit = TimeUnit.for_all(seconds for seconds in step if seconds is not None)
    both = [plan, *shown]
    hidden = len(plan.alternatives) - len(shown)
    replicas = [each.replicas for each in both]
    return FittingTable(
        "Alternatives",
        [
            Column("schedule", [each.schedule for each in both], text=True),
            Column("micro-\nbatches", [str(each.micro_batches) for each in both]),
            Column("stages", [str(len(plan.stages)), *(str(other.stages) for other in shown)]),
            Column("chunks", [str(each.chunks) for each in both], rank=1),
            *([Column("replicas", [str(count) for count in replicas])] if max(replicas) > 1 else []),
            Column(
                f"step\n{unit.name}", [NONE if seconds is None else unit.text(seconds) for seconds in step]
            ),
            Column("memory", [NONE if held is None else size(held) for held in memory]),
            Column("why it lost", ["taken", *(other.why for other in shown)], text=True),
        ],
        notes=[f"And {hidden} more: `pipepart explain` shows them."] if hidden else [],
    )


def _best_of_each(plan: Plan) -> tuple[Alternative, ...]:
    """Of each schedule the first one: they are sorted."""
    found: dict[str, Alternative] = {}
    for other in plan.alternatives:
        if other.step_seconds is not None:
            found.setdefault(other.schedule, other)
    return tuple(found.values())
