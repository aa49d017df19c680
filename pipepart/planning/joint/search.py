"""Finds the plan with the shortest step: layouts by annealing, then the order of the best ones, then plans of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import schedules
from schedules import Kind
from schedules.searching.allowance import Allowance

from ..costs.layer_ranges import TOLERANCE
from ..plans.plan import Plan
from ..plans.searched_order import SEARCH
from .annealing import Annealing
from .layout import OrderedLayout
from .request import JointRequest
from .starts import layout_of
from .to_plan import plan_of

_MOST_DEVICES = 128  # each step of the dispatcher looks at all of them
_FEWEST_LAYOUTS = 40  # with fewer, the search would hardly find anything but its starts
_SEARCHING = 0.75  # of the clock; the rest is for the plans
_MOST_PLANS = 40  # layouts that plans are made of until one fits


def search_jointly(
    request: JointRequest, starts: Sequence[Plan], allowance: Allowance, seed: int = 0
) -> Plan | None:
    """Return the plan with the shortest step that the joint search finds; None if it finds none faster than its starts.

    It is not made for more than 128 devices, or where the allowance is too little to dispatch some dozens of layouts:
    3 operations for each micro-batch and device.

    Args:
        request: what to choose from.
        starts: plans with one or several stages a device. Their stages and placements are starts; their steps are to be
            beaten.
        allowance: how much work to do.
        seed: of the random moves.
    """
    if request.asked.reduction == "batch":
        return None  # the last stage must run all forwards first
    devices = len(request.groups.cluster)
    smallest = 3 * request.micro_batches * min(devices, request.costs.layers)
    if devices > _MOST_DEVICES or smallest * _FEWEST_LAYOUTS > allowance.operations:
        return None
    goal = min((plan.predicted.step_seconds for plan in starts), default=math.inf)
    if goal <= request.bound * (1 + TOLERANCE):
        return None
    annealing = Annealing(request, allowance.part(allowance.operations, _SEARCHING), Random(seed))
    annealing.run([layout_of(plan, request) for plan in starts if plan.replicas == request.groups.replicas])
    kinds = annealing.pricing.device_kinds()
    for ordered in annealing.distinct(_MOST_PLANS):
        if ordered.seconds >= goal * (1 - TOLERANCE):
            return None
        plans = _plans_of(request, _on_first_devices(ordered, kinds))
        best = min(plans, key=lambda plan: plan.predicted.step_seconds, default=None)
        if best is not None and best.predicted.step_seconds < goal * (1 - TOLERANCE):
            return best
        if allowance.clock.is_over:
            return None
    return None


def _plans_of(request: JointRequest, ordered: OrderedLayout) -> list[Plan]:
    """Return plans that fit: with each I and the W right behind it as one full backward, and as they are."""
    order = ordered.problem.schedule_of(SEARCH, ordered.rows)
    orders = [order]
    if any(action.kind is Kind.I for row in order.actions for action in row):
        orders = [schedules.fuse_backward(order), order]
    plans = (plan_of(request, ordered.layout, order) for order in orders)
    return [plan for plan in plans if plan is not None]


def _on_first_devices(ordered: OrderedLayout, kinds: Sequence[int]) -> OrderedLayout:
    """Return the layout with alike devices exchanged, so that earlier stages are on earlier ones."""
    goes_to: dict[int, int] = {}
    for kind in set(kinds):
        alike = [device for device, own in enumerate(kinds) if own == kind]
        used = [device for device in dict.fromkeys(ordered.layout.devices) if kinds[device] == kind]
        unused = [device for device in alike if device not in used]
        goes_to |= zip([*used, *unused], alike, strict=True)
    rows = {goes_to[device]: row for device, row in enumerate(ordered.rows)}
    devices = tuple(goes_to[device] for device in ordered.layout.devices)
    return replace(
        ordered,
        layout=replace(ordered.layout, devices=devices),
        problem=replace(ordered.problem, device_of=devices),
        rows=[rows[device] for device in range(len(kinds))],
    )
