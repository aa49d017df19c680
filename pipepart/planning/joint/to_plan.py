"""Converts a layout and an order of its operations to a plan."""

from __future__ import annotations

from itertools import pairwise

import schedules

from ..plans.plan import Plan
from ..plans.searched_order import SEARCH, order_text
from ..plans.stage_plan import StagePlan
from .layout import Layout
from .request import JointRequest


def plan_of(request: JointRequest, layout: Layout, order: schedules.Schedule) -> Plan | None:
    """Return the predicted plan of a layout; None if it does not fit the memory.

    Args:
        request: layers, devices and keywords.
        layout: the stages.
        order: schedule of one replica.
    """
    cluster, groups = request.groups.cluster, request.groups
    names = [info.name for info in request.profile.layers]
    homes = [cluster.devices[device].name for device in layout.devices]
    stages = tuple(
        StagePlan(layers=tuple(names[start:end]), device=home).with_mode(mode)
        for (start, end), home, mode in zip(
            pairwise((0, *layout.borders, len(names))), homes, layout.modes, strict=True
        )
    )
    plan = Plan.model_construct(
        stages=stages,
        cluster=groups.all_devices,
        schedule=SEARCH,
        micro_batches=request.costs.micro_batches,
        actions=order_text(order),
        replica_devices=tuple(
            tuple(groups.members[home][replica] for home in homes) for replica in range(1, groups.replicas)
        ),
        profile=request.profile,
        constraints=request.asked,
    ).predict(request.costs)
    return plan if plan.fits else None
