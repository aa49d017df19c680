"""Explains why no plan fits: the device that lacks memory, the missing bytes, and what uses its memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import counted, format_bytes
from .plans.plan import Plan


@dataclass(frozen=True)
class Infeasible:
    """Why a candidate has no plan.

    Attributes:
        text: the explanation.
        stage: the stage that does not fit, in the cut that lacks the least memory.
        deficit_bytes: missing bytes on its device; 0 if no amount of memory is enough.
        plan: of this cut; None if no amount of memory is enough.
    """

    text: str
    stage: int = 0
    deficit_bytes: int = 0
    plan: Plan | None = None


def explain_infeasible(nearest: Plan, least_deficit: int | None) -> Infeasible:
    """Return an explanation of the device with the largest memory deficit, and of what uses its memory.

    Args:
        nearest: the plan with the smallest deficit.
        least_deficit: lower bound of the deficit of every cut, in bytes; None if unknown.
    """
    needs = nearest.device_bytes()
    limits = {device.name: device.memory_bytes for device in nearest.groups.devices}
    deficits = {name: need - limit for name, need in needs.items() if (limit := limits[name]) is not None}
    name = max(deficits, key=lambda name: deficits[name])
    stages = {
        number % len(nearest.stages): stage
        for number, stage in enumerate(nearest.all_stages)
        if stage.device == name
    }
    need, deficit = needs[name], deficits[name]
    static = sum(stage.static_bytes for stage in stages.values())
    transient = max(stage.transient_bytes for stage in stages.values())
    spans = [
        f"{number} ({' to '.join(dict.fromkeys((stage.layers[0], stage.layers[-1])))})"
        for number, stage in stages.items()
    ]
    modes = sorted({f"recompute={stage.recompute!r}" for stage in stages.values()} - {"recompute='never'"})
    modes += ["offload='stash'"] if any(stage.mode == "offload" for stage in stages.values()) else []
    text = (
        f"with {counted(len(nearest.stages), 'stage')}, {counted(nearest.micro_batches, 'micro-batch', 'es')} and "
        f"schedule {nearest.schedule!r}, stage {' and '.join(spans)} on {name} is short by {counted(deficit, 'byte')} "
        f"{'at best' if deficit == least_deficit else 'in the best cut found'}: it needs {need} ({format_bytes(need)}: "
        f"{format_bytes(static)} of parameters, gradients, optimizer state and buffers, "
        f"{format_bytes(need - static - transient)} kept for backwards{''.join(f' ({mode})' for mode in modes)}, "
        f"{format_bytes(transient)} of workspace) and has {need - deficit} ({format_bytes(need - deficit)})"
    )
    also = [
        f"{also} by {counted(lack, 'byte')}" for also, lack in deficits.items() if lack > 0 and also != name
    ]
    if also:
        text += f"; also short: {', '.join(also)}"
    return Infeasible(text, max(stages, key=lambda number: stages[number].memory_bytes), deficit, nearest)
