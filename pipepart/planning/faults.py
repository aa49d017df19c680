"""What is wrong with a plan, above all one that was written or edited by hand: one text a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import schedules

from ..units import format_bytes

if TYPE_CHECKING:
    from ..capture import LayerInfo
    from .plan import Plan
    from .stage_plan import StagePlan


def structure_faults(plan: Plan) -> list[str]:
    """Faults of the stages, their devices and the schedule; the later ones only where they can be told."""
    faults = _device_faults(plan)
    names = [name for stage in plan.stages for name in stage.layers]
    faults += [
        f"layer {name!r} is there {count} times" for name, count in Counter(names).items() if count > 1
    ]
    faults += _schedule_faults(plan)
    if plan.profile is not None:
        faults += _profile_faults(plan)
    if plan.profile is not None and not faults:
        layers = plan.profile.layers
        faults = _order_faults(plan.stages, layers) or _sharing_faults(plan.stages, layers)
    return faults


def memory_faults(plan: Plan) -> list[str]:
    """The devices that hold less than the plan needs; for a plan whose figures are fresh."""
    if plan.profile is None:
        return []
    faults = []
    for name, need in plan.device_bytes().items():
        limit = plan.cluster.device(name).memory_bytes
        if limit is not None and need > limit:
            where = [str(index) for index, stage in enumerate(plan.stages) if stage.device == name]
            faults.append(
                f"device {name!r} (stage {', '.join(where)}) is short by {need - limit} bytes: it needs {need} "
                f"({format_bytes(need)}) and has {limit} ({format_bytes(limit)})"
            )
    return faults


def _device_faults(plan: Plan) -> list[str]:
    known = [device.name for device in plan.cluster.devices]
    return [
        f"stage {index} is on device {stage.device!r}, the cluster has {known}"
        for index, stage in enumerate(plan.stages)
        if stage.device not in known
    ]


def _schedule_faults(plan: Plan) -> list[str]:
    if plan.schedule not in schedules.names():
        return [f"no schedule is called {plan.schedule!r}: there are {', '.join(schedules.names())}"]
    if len(plan.stages) % plan.chunks:
        return [f"{len(plan.stages)} stages are not {plan.chunks} (chunks) for each device"]
    try:
        placement = plan.build_schedule().device_of
    except schedules.ScheduleError as error:
        return [f"schedule {plan.schedule!r} does not exist for this plan: {error}"]
    if len(placement) != len(plan.stages):
        return []  # a schedule with several copies of the model: the pipeline refuses it
    rows: dict[int, list[int]] = {}
    for stage, row in enumerate(placement):
        rows.setdefault(row, []).append(stage)
    faults = []
    taken: dict[str, int] = {}
    for own in rows.values():
        for stage in own:
            device = plan.stages[stage].device
            if device != plan.stages[own[0]].device:
                faults.append(
                    f"schedule {plan.schedule!r} has stages {own[0]} and {stage} on one device, the plan has them on "
                    f"{plan.stages[own[0]].device!r} and {device!r}"
                )
        first = plan.stages[own[0]].device
        if first in taken:
            faults.append(
                f"stages {taken[first]} and {own[0]} are both on device {first!r}, schedule {plan.schedule!r} has "
                "them on two"
            )
        taken.setdefault(first, own[0])
    return faults


def _profile_faults(plan: Plan) -> list[str]:
    assert plan.profile is not None
    known = {info.name: None for info in plan.profile.layers}
    planned = {name for stage in plan.stages for name in stage.layers}
    faults = [
        f"stage {index} has layer {name!r}, which is none of the model's"
        for index, stage in enumerate(plan.stages)
        for name in stage.layers
        if name not in known
    ]
    faults += [f"layer {name!r} is in no stage" for name in known if name not in planned]
    measured = [costs.micro_batches for costs in plan.profile.costs]
    if plan.micro_batches not in measured:
        faults.append(
            f"micro_batches is {plan.micro_batches}, and the costs in the plan are those of {measured}: plan again"
        )
    if plan.fingerprint and plan.fingerprint != plan.profile.fingerprint:
        faults.append("the layers in the plan's profile are not those that it was made for: plan again")
    return faults


def _order_faults(stages: Sequence[StagePlan], layers: Sequence[LayerInfo]) -> list[str]:
    """Stages that a path leaves and comes back to, and stages that stand before what they need."""
    index = {info.name: position for position, info in enumerate(layers)}
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.layers}
    faults = []
    for number, stage in enumerate(stages):
        places = [index[name] for name in stage.layers]
        if places != sorted(places):
            faults.append(f"stage {number} has its layers in another order than the model runs them")
        between = [
            layers[place].name
            for place in range(min(places), max(places))
            if stage_of[layers[place].name] != number
        ]
        if between:
            faults.append(
                f"stage {number} is not connected: {between[0]!r} of stage {stage_of[between[0]]} runs between its "
                f"layers {layers[min(places)].name!r} and {layers[max(places)].name!r}"
            )
    if not faults:
        faults = [
            f"stage {number} stands before stage {number - 1} in the model: its layer {stages[number].layers[0]!r} "
            f"runs before {stages[number - 1].layers[0]!r}"
            for number in range(1, len(stages))
            if index[stages[number].layers[0]] < index[stages[number - 1].layers[0]]
        ]
    return faults


def _sharing_faults(stages: Sequence[StagePlan], layers: Sequence[LayerInfo]) -> list[str]:
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.layers}
    return [
        f"layers {other!r} (stage {stage_of[other]}) and {info.name!r} (stage {stage_of[info.name]}) share a "
        "parameter or buffer and must be in one stage"
        for info in layers
        for other in info.shares_with
        if stage_of[other] != stage_of[info.name]
    ]
