"""Joint search: anneals layouts and their orders, then converts the best layouts to plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import schedules
from schedules import Kind
from schedules.searching.allowance import Allowance

from ...cluster import Cluster
from ...graph_partition.device_orders import device_types
from ..costs.layer_ranges import TOLERANCE
from ..plans.plan import Plan
from ..plans.searched_order import SEARCH, order_text
from ..search.parts import Part
from .annealing import Annealing
from .layout import OrderedLayout, first_devices

_MOST_DEVICES = 128  # each step of the dispatcher scans all devices
_FEWEST_LAYOUTS = 40  # do not search if the allowance is too small to dispatch so many layouts
_SEARCH_SHARE = 0.75  # share of the clock for annealing; the rest is for the plans
_MOST_PLANS = 20  # number of layouts to convert to plans until one fits
# Joining I and W to full backwards hardly ever shortens an order to less than this fraction of its seconds.
_FULL_BACKWARD_RATIO = 0.98


def search_jointly(part: Part, starts: Sequence[Plan], allowance: Allowance, seed: int = 0) -> Plan | None:
    """Search cut, placement and order together; return a plan with a shorter step than all starts, or None.

    Returns None at once for more than 128 devices, or if the allowance is too small to dispatch 40 layouts with 3
    operations per micro-batch and device.

    Args:
        part: layers, devices and constraints.
        starts: plans to start from and to beat, with one or several stages per device.
        allowance: the budget of the search.
        seed: of the random moves.
    """
    devices = len(part.groups.cluster)
    smallest = 3 * part.micro_batches * min(devices, part.costs.layers)
    if devices > _MOST_DEVICES or smallest * _FEWEST_LAYOUTS > allowance.operations:
        return None
    goal = min((plan.predicted.step_seconds for plan in starts), default=math.inf)
    if goal <= part.least_seconds(part.most_devices) * (1 + TOLERANCE):
        return None
    annealing = Annealing(part, allowance.part(allowance.operations, _SEARCH_SHARE), Random(seed))
    annealing.run(starts)
    for ordered in annealing.distinct(_MOST_PLANS):
        if ordered.seconds * _FULL_BACKWARD_RATIO >= goal:
            return None
        plans = _plans_of(part, _on_first_devices(ordered, part.groups.cluster))
        if plans:
            best = min(plans, key=lambda plan: plan.predicted.step_seconds)
            return best if best.predicted.step_seconds < goal * (1 - TOLERANCE) else None
        if allowance.clock.is_over:
            return None
    return None


def _plans_of(part: Part, ordered: OrderedLayout) -> list[Plan]:
    """Return the plans of a layout that fit: with each I and its adjacent W as a full backward, and unchanged."""
    order = ordered.problem.schedule_of(SEARCH, ordered.rows)
    orders = [order]
    if any(action.kind is Kind.I for row in order.actions for action in row):
        orders = [schedules.fuse_backward(order), order]
    layout = ordered.layout
    plans = (
        part.plan_of(
            layout.borders,
            layout.devices,
            layout.modes,
            schedule=SEARCH,
            actions=order_text(order),
        )
        for order in orders
    )
    return [plan for plan in plans if plan.fits]


def _on_first_devices(ordered: OrderedLayout, cluster: Cluster) -> OrderedLayout:
    """Permute interchangeable devices so that earlier stages are on earlier devices."""
    new_device = first_devices(ordered.layout.devices, device_types(cluster))
    rows = {new_device[device]: row for device, row in enumerate(ordered.rows)}
    devices = tuple(new_device[device] for device in ordered.layout.devices)
    return replace(
        ordered,
        layout=replace(ordered.layout, devices=devices),
        problem=replace(ordered.problem, device_of=devices),
        rows=[rows[device] for device in range(len(cluster))],
    )
