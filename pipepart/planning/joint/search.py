"""Finds the plan with the shortest step: layouts by annealing, then the order of the best ones, then plans of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import schedules
from schedules import Kind

from ..costs.layer_ranges import TOLERANCE
from ..plan_document import Plan
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
        for order in _orders(request, joined):
            made = plan_of(request, joined.layout, order)
            if made is not None and made.predicted.step_seconds < goal * (1 - TOLERANCE):
                best, goal = made, made.predicted.step_seconds
        if best is not None:
            return best
    return best


def _orders(request: JointRequest, found: Judged) -> list[schedules.Schedule]:
    """The order that was found, with each I and the W right behind it as one full backward, and as it is."""
    order = order_of(found.layout, request.micro_batches, found.rows)
    if not any(action.kind is Kind.I for row in order.actions for action in row):
        return [order]
    return [schedules.fuse_backward(order), order]
