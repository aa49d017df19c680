"""What is wrong with a plan, above all one that was written or edited by hand: one text a fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import schedules

from ..units import counted, format_bytes
from .search.order_text import SEARCH

if TYPE_CHECKING:
    from ..capture import LayerInfo
    from .plan_document import Plan
    from .stage_plan import StagePlan


def structure_faults(plan: Plan) -> list[str]:
    """Faults of the stages, their devices and the schedule; each as far as it can be told beside the others."""
    layers = _layer_faults(plan)
    faults = [*_device_faults(plan), *layers]
    profile = plan.profile
    if profile is None:
        return faults + _schedule_faults(plan) + _prediction_faults(plan)
    measured = [costs.micro_batches for costs in profile.costs]
    if plan.micro_batches in measured:
        faults += _schedule_faults(plan)
    else:
        faults.append(
            f"micro_batches is {plan.micro_batches}, and the costs in the plan are those of {measured}: plan again"
        )
    if plan.fingerprint and plan.fingerprint != profile.fingerprint:
        faults.append("the layers in the plan's profile are not those that it was made for: plan again")
    if plan.outputs and plan.outputs != profile.outputs:
        faults.append("the outputs of the plan are not those of its profile: plan again")
    if not layers:
        faults += _order_faults(plan.stages, profile.layers)
    return faults


def memory_faults(plan: Plan) -> list[str]:
    """The devices that hold less than the plan needs; for a plan whose figures are fresh, or all by hand."""
    faults = []
    stages = plan.all_stages
    for name, need in plan.device_bytes().items():
        limit = plan.cluster.device(name).memory_bytes
        if limit is not None and need > limit:
            own = {index % len(plan.stages) for index, stage in enumerate(stages) if stage.device == name}
            where = ", ".join(map(str, sorted(own)))
            faults.append(
                f"device {name!r} (stage {where}) is short by {counted(need - limit, 'byte')}: it needs {need} "
                f"({format_bytes(need)}) and has {limit} ({format_bytes(limit)})"
            )
    return faults


def _device_faults(plan: Plan) -> list[str]:
    known = [device.name for device in plan.cluster.devices]
    faults = [
        f"stage {index} is on device {stage.device!r}, the cluster has {known}"
        for index, stage in enumerate(plan.stages)
        if stage.device not in known
    ]
    return faults + [
        f"stage {index} of copy {copy} is on device {name!r}, the cluster has {known}"
        for copy, names in enumerate(plan.replica_devices, 1)
        for index, name in enumerate(names)
        if name not in known
    ]


def _layer_faults(plan: Plan) -> list[str]:
    """Layers that are in several places, in none, or not the model's."""
    places: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for name in stage.layers:
            places.setdefault(name, []).append(index)
    faults = [
        f"layer {name!r} is there {len(where)} times: in stages {', '.join(map(str, where))}"
        for name, where in places.items()
        if len(where) > 1
    ]
    if plan.profile is None:
        return faults
    known = {info.name: None for info in plan.profile.layers}
    faults += [
        f"stage {where[0]} has layer {name!r}, which is none of the model's"
        for name, where in places.items()
        if name not in known
    ]
    return faults + [f"layer {name!r} is in no stage" for name in known if name not in places]


def _prediction_faults(plan: Plan) -> list[str]:
    """Of one that stays as it is, as there is no profile to compute it from."""
    if plan.prediction is None or len(plan.prediction.memory_bytes) == len(plan.cluster):
        return []
    return [
        f"the prediction has the memory of {len(plan.prediction.memory_bytes)} devices, there are {len(plan.cluster)}"
    ]


def _schedule_faults(plan: Plan) -> list[str]:
    if plan.schedule not in (*schedules.names(), SEARCH):
        return [f"no schedule is called {plan.schedule!r}: there are {', '.join(schedules.names())}"]
    if plan.actions and plan.schedule != SEARCH:
        return [f"schedule {plan.schedule!r} says its actions itself: take them out, or write {SEARCH!r}"]
    if len(plan.stages) % plan.chunks:
        return [f"{len(plan.stages)} stages are not {plan.chunks} (chunks) for each device"]
    try:
        built = plan.model_copy(update={"split_critical": ()}).build_schedule()
    except schedules.ScheduleError as error:
        return [f"schedule {plan.schedule!r} does not exist for this plan: {error}"]
    if built.model_stages != len(plan.stages):
        return [
            f"{len(plan.stages)} stages are not {plan.chunks} for each device: schedule {plan.schedule!r} has "
            f"{built.model_stages}"
        ]
    return _copy_faults(plan) or _split_faults(plan) or _row_faults(plan, built.device_of)


def _copy_faults(plan: Plan) -> list[str]:
    faults = [
        f"copy {copy} of the model has {counted(len(names), 'device')}, one for each of the {len(plan.stages)} stages "
        "is wanted"
        for copy, names in enumerate(plan.replica_devices, 1)
        if len(names) != len(plan.stages)
    ]
    if plan.replicas > plan.micro_batches:
        faults.append(
            f"{plan.replicas} copies of the model are more than the {plan.micro_batches} micro-batches that they share"
        )
    return faults


def _split_faults(plan: Plan) -> list[str]:
    if not plan.split_critical:
        return []
    if plan.model_copy(update={"split_critical": ()}).asynchronous:
        return [
            f"schedule {plan.schedule!r} is asynchronous: its backwards cannot be split: empty split_critical"
        ]
    try:
        plan.build_schedule()
    except schedules.ScheduleError as error:
        return [f"split_critical names what is no full backward: {error}; take it out"]
    return []


def _row_faults(plan: Plan, placement: Sequence[int]) -> list[str]:
    """Stages that the schedule has on one device and the plan on two, or the other way round."""
    copies = [[stage.device for stage in plan.stages], *plan.replica_devices]
    apart = len(placement) // len(copies)
    faults = []
    taken: dict[str, str] = {}
    for copy, devices in enumerate(copies):
        rows: dict[int, list[int]] = {}
        for stage, row in zip(range(len(devices)), placement[copy * apart :], strict=False):
            rows.setdefault(row, []).append(stage)
        of_copy = f" of copy {copy}" if copy else ""
        for own in rows.values():
            first = devices[own[0]]
            faults += [
                f"schedule {plan.schedule!r} has stages {own[0]} and {stage}{of_copy} on one device, the plan has them "
                f"on {first!r} and {devices[stage]!r}"
                for stage in own
                if devices[stage] != first
            ]
            if first in taken:
                faults.append(
                    f"stages {taken[first]} and {own[0]}{of_copy} are both on device {first!r}, schedule "
                    f"{plan.schedule!r} has them on two"
                )
            taken.setdefault(first, f"{own[0]}{of_copy}")
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
