"""Chooses by simulation what each stage that does not fit does with its stash: recompute it, or offload it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..costs.layer_ranges import TOLERANCE, ChainCosts
from ..costs.stage_memory import Mode
from ..plans.plan import Plan

# What a stage may do instead. One that keeps its stash does nothing better.
_INSTEAD: Mapping[Mode, tuple[Mode, ...]] = {
    "never": (),
    "except-last": ("offload",),
    "always": ("offload",),
    "offload": ("except-last", "always"),
}


def with_best_modes(plan: Plan, modes: Sequence[Mode], costs: ChainCosts) -> Plan:
    """Return the plan with recompute and offload exchanged in the stages where that makes the step shorter.

    One stage after the other, from the first on, takes the mode with the shortest step.

    Args:
        plan: that fits.
        modes: that stages may use.
        costs: of the layers.
    """
    if "offload" not in modes or not _shorter(_with_modes(plan, {}, costs), plan):
        return plan  # if all stages kept their stashes, it would be no faster
    for number, stage in enumerate(plan.stages):
        for mode in _INSTEAD[stage.mode]:
            if mode not in modes:
                continue
            own: dict[int, Mode] = {at: other.mode for at, other in enumerate(plan.stages)}
            made = _with_modes(plan, {**own, number: mode}, costs)
            if _shorter(made, plan) and made.fits:
                plan = made
    return plan


def _with_modes(plan: Plan, modes: Mapping[int, Mode], costs: ChainCosts) -> Plan:
    stages = [stage.with_mode(modes.get(number, "never")) for number, stage in enumerate(plan.stages)]
    return plan.model_copy(update={"stages": tuple(stages)}).predict(costs)


def _shorter(one: Plan, other: Plan) -> bool:
    return one.predicted.step_seconds < other.predicted.step_seconds * (1 - TOLERANCE)
