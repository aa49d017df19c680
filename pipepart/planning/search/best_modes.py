"""Chooses by simulation what each stage that does not fit does with its stash: recompute it, or offload it."""

from __future__ import annotations

from collections.abc import Sequence

from ..costs.layer_ranges import TOLERANCE, ChainCosts
from ..costs.stage_memory import Mode
from ..plan_document import Plan

_MOST = 200  # plans that are simulated


def with_best_modes(plan: Plan, modes: Sequence[Mode], costs: ChainCosts) -> Plan:
    """Return the plan with other modes for the stages that do not keep their stash, where the step is shorter then.

    One stage after the other, from the first on, takes the mode with the shortest step, until no stage changes.

    Args:
        plan: that fits.
        modes: that stages may use.
        costs: of the layers.
    """
    left = _MOST if "offload" in modes else 0
    changed = True
    while changed:
        changed = False
        for number, stage in enumerate(plan.stages):
            for mode in modes if stage.mode != "never" else ():
                left -= 1
                if left < 0:
                    return plan
                made = _changed(plan, number, mode, costs)
                if made.predicted.step_seconds < plan.predicted.step_seconds * (1 - TOLERANCE) and _fits(
                    made
                ):
                    plan, changed = made, True
    return plan


def _changed(plan: Plan, number: int, mode: Mode, costs: ChainCosts) -> Plan:
    stages = [stage.with_mode(mode) if at == number else stage for at, stage in enumerate(plan.stages)]
    return plan.model_copy(update={"stages": tuple(stages)}).predict(costs)


def _fits(plan: Plan) -> bool:
    needs = zip(plan.cluster.devices, plan.predicted.memory_bytes, strict=True)
    return all(device.memory_bytes is None or need <= device.memory_bytes for device, need in needs)
