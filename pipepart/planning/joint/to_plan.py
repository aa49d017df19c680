"""Turns a layout and its rows of operations into a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import schedules
from schedules import Action, Kind
from schedules.searching.dispatching import Row

from ..plans.plan import Plan
from ..plans.searched_order import SEARCH, order_text
from ..plans.stage_plan import StagePlan
from .layout import Layout
from .request import JointRequest

_KINDS = (Kind.F, Kind.I, Kind.W)


def order_of(layout: Layout, micro_batches: int, rows: Sequence[Row]) -> schedules.Schedule:
    """Return rows of operations as a schedule. Devices without stages are left out.

    An I with its W behind it becomes a full backward on stages that fuse.
    """
    stages = layout.stages
    used = [row for row in rows if row]
    place = {device: index for index, device in enumerate(at for at, row in enumerate(rows) if row)}

    def actions(row: Row) -> tuple[Action, ...]:
        found = []
        for operation in row:
            stream, k = divmod(operation, micro_batches)
            kind, stage = divmod(stream, stages)
            if layout.fused[stage] and kind:
                if kind == 1:
                    found.append(Action(Kind.B, stage, k))
            else:
                found.append(Action(_KINDS[kind], stage, k))
        return tuple(found)

    return schedules.Schedule(
        SEARCH,
        tuple(map(actions, used)),
        tuple(place[device] for device in layout.devices),
        micro_batches,
    )


def plan_of(request: JointRequest, layout: Layout, order: schedules.Schedule) -> Plan | None:
    """Return the plan of a layout with an order of one replica, predicted; None if it does not fit."""
    cluster, groups = request.groups.cluster, request.groups
    names = [info.name for info in request.profile.layers]
    homes = [cluster.devices[device].name for device in layout.devices]
    stages = tuple(
        StagePlan(layers=tuple(names[start:end]), device=home, recompute=mode)
        for (start, end), home, mode in zip(
            pairwise((0, *layout.borders, len(names))), homes, layout.modes, strict=True
        )
    )
    made = Plan.model_construct(
        stages=stages,
        cluster=groups.all_devices,
        schedule=SEARCH,
        micro_batches=request.costs.micro_batches,
        actions=order_text(order),
        replica_devices=tuple(
            tuple(groups.members[home][replica] for home in homes) for replica in range(1, groups.replicas)
        ),
        fingerprint=request.fingerprint,
        outputs=request.profile.outputs,
        profile=request.profile,
        constraints=request.asked,
    ).predict(request.costs)
    return made if made.fits else None
