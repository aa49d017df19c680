"""Finds the plan with the shortest step: layouts by annealing, then the order of the best ones, then plans of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import schedules
from schedules import Kind

from ..costs.layer_ranges import TOLERANCE
from ..plans.plan import Plan
from .allowance import Allowance
from .annealing import Annealing
from .judged import Judged, with_fewer_stages
from .request import JointRequest
from .starts import layout_of
from .to_plan import order_of, plan_of

_TRIED = 4  # layouts that plans are made of until one is better than the starts


def search_jointly(
    request: JointRequest, starts: Sequence[Plan], allowance: Allowance, seed: int = 0
) -> Plan | None:
    """Return the plan with the shortest step that the joint search finds; None if it finds none faster than its starts.

    Args:
        request: what to choose from.
        starts: plans with one or several stages a device. Their stages and placements are starts; their steps are to be
            beaten.
        allowance: how much work to do; counted in it.
        seed: of the random moves.
    """
    if request.asked.reduction == "batch":
        return None  # the last stage must run all forwards first
    goal = min((plan.predicted.step_seconds for plan in starts), default=math.inf)
    if goal <= request.bound * (1 + TOLERANCE):
        return None
    annealing = Annealing(request, allowance, Random(seed))
    annealing.run([layout_of(plan, request) for plan in starts if plan.replicas == request.groups.replicas])
    best: Plan | None = None
    for found in annealing.best[:_TRIED]:
        joined = with_fewer_stages(found, annealing.pricing) if request.may_join else found
        joined = _on_first_devices(joined, annealing.pricing.device_kinds())
        for order in _orders(request, joined):
            made = plan_of(request, joined.layout, order)
            if made is not None and made.predicted.step_seconds < goal * (1 - TOLERANCE):
                best, goal = made, made.predicted.step_seconds
        if best is not None:
            return _keeping_what_fits(request, best)
    return best


def _keeping_what_fits(request: JointRequest, plan: Plan) -> Plan:
    """Return the plan without the recomputes that memory does not need: the search takes some that cost nothing."""
    if request.asked.recompute != "auto":
        return plan
    for number, stage in enumerate(plan.stages):
        if stage.recompute == "never":
            continue
        stages = [*plan.stages[:number], stage.with_mode("never"), *plan.stages[number + 1 :]]
        made = plan.model_copy(update={"stages": tuple(stages)}).predict(request.costs)
        if made.fits and made.predicted.step_seconds <= plan.predicted.step_seconds:
            plan = made
    return plan


def _on_first_devices(found: Judged, kinds: Sequence[int]) -> Judged:
    """Return what was found with alike devices exchanged, so that earlier stages are on earlier ones."""
    firsts = dict.fromkeys(found.layout.devices)
    goes_to: dict[int, int] = {}
    for kind in set(kinds):
        alike = [device for device, own in enumerate(kinds) if own == kind]
        used = [device for device in firsts if kinds[device] == kind]
        goes_to |= zip([*used, *(device for device in alike if device not in firsts)], alike, strict=True)
    rows = {goes_to[device]: row for device, row in enumerate(found.rows)}
    devices = tuple(goes_to[device] for device in found.layout.devices)
    return replace(
        found,
        layout=replace(found.layout, devices=devices),
        rows=[rows[device] for device in range(len(kinds))],
    )


def _orders(request: JointRequest, found: Judged) -> list[schedules.Schedule]:
    """The order that was found, with each I and the W right behind it as one full backward, and as it is."""
    order = order_of(found.layout, request.micro_batches, found.rows)
    if not any(action.kind is Kind.I for row in order.actions for action in row):
        return [order]
    return [schedules.fuse_backward(order), order]
