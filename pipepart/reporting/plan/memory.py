"""Table of the peak memory of each device of a plan."""

from __future__ import annotations

from ...planning import Plan, StagePlan
from ..kit.quantity import NONE, bar, percent, size
from ..kit.table import Column, FittingTable
from .stage_names import owned_stages, stage_numbers


def memory_table(plan: Plan) -> FittingTable:
    """Make a table with one row per device: its peak memory and its limit."""
    owned = owned_stages(plan)
    everywhere = plan.all_stages
    stages = {device: [everywhere[number] for number in numbers] for device, numbers in owned.items()}
    needs = plan.device_bytes()
    static = {device: sum(stage.static_bytes for stage in own) for device, own in stages.items()}
    transient = {device: max(stage.transient_bytes for stage in own) for device, own in stages.items()}
    kept = {device: needs[device] - static[device] - transient[device] for device in owned}
    again = any(stage.recompute != "never" for stage in plan.stages)
    waits = any(stage.deferred_weight_grads and stage.deferred_bytes for stage in plan.stages)
    terms = [" + ".join(filter(None, map(_terms, own))) or NONE for own in stages.values()]
    single = all(len(own) == 1 for own in stages.values())
    plain = single and not again and not waits
    columns = [
        Column(
            "stage" if single else "stages",
            [stage_numbers(owned[device], len(plan.stages)) for device in owned],
        ),
        Column("device", list(owned), text=True),
        Column("parameters,\noptimizer", [size(static[device]) for device in owned]),
        # A single product is a number; a sum may fold.
        Column("in flight\n× stash", terms, rank=0 if plain else 3, text=not plain),
        *([] if plain else [Column("kept for\nbackward", [size(kept[device]) for device in owned])]),
        Column("workspace", [size(transient[device]) for device in owned], rank=2),
        Column("total", [size(needs[device]) for device in owned], style="bold"),
    ]
    limits = [plan.cluster.device(device).memory_bytes for device in owned]
    if any(limits):
        parts = [
            needs[device] / limit if limit else None for device, limit in zip(owned, limits, strict=True)
        ]
        columns += [
            Column("limit", [size(limit) if limit else "none" for limit in limits]),
            Column("used", [NONE if part is None else percent(part) for part in parts]),
            Column(
                "", ["" if part is None else bar(part) for part in parts], rank=4, text=True, style="cyan"
            ),
        ]
    return FittingTable("Devices: memory", columns, notes=_notes(plan, again, waits, single))


def _terms(stage: StagePlan) -> str:
    """Format the counts of full stashes, input-only stashes and deferred weight gradients."""
    kept = [
        (stage.full_stashes, stage.stash_bytes),
        (stage.input_only, stage.boundary_bytes),
        (stage.deferred_weight_grads, stage.deferred_bytes),
    ]
    return " + ".join(f"{count} × {size(each)}" for count, each in kept if count and each)


def _notes(plan: Plan, again: bool, waits: bool, single: bool) -> list[str]:
    notes = [
        "Stash: kept per micro-batch in flight for its backward. Workspace: temporary memory of one layer."
    ]
    if again:
        notes = [
            "Stash: kept per micro-batch in flight for its backward; only the stage's input if the stage recomputes. "
            "Workspace: temporary memory of one layer."
        ]
    if waits:
        notes.append(
            "Between the backward for inputs and the backward for weights, what the latter needs replaces the stash."
        )
    if plan.replicas > 1:
        notes.append("Each replica has its own parameters and gradients; only the first has optimizer state.")
    if not single:
        notes.append("Kept: the peak of all stages of the device together.")
    return notes
