"""Plan: which layers run where, in what order, and the predicted cost; checked when it is made or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import ValidationError, model_validator

import schedules
from schedules.core.action import COMMUNICATION

from ...capture import LayerInfo
from ...document import fault_texts
from ...input_error import InputError
from ...pages import notebook_html, to_html
from ...units import counted, format_bytes
from ..export import Export, export_plan
from .plan_record import PlanRecord
from .searched_order import SEARCH
from .stage_plan import StagePlan


class Plan(PlanRecord):
    """A model cut into stages, and the schedule that runs them.

    Attributes:
        stages: in pipeline order.
        cluster: the devices that the stages run on.
        schedule: its name, or ``"search"``.
        micro_batches: the number of parts of a mini-batch.
        chunks: stages of each device; the schedule determines which. Ignored under ``"search"``.
        actions: the order of actions of each device if the schedule is ``"search"``, in the notation of
            ``schedules.Action``: of one replica, without recomputes. Devices may have different numbers of stages.
        split_critical: full backwards on the critical path, in the schedule of one replica, that run as their two parts
            (I, then W), so that the gradient of the stage's input leaves before its weight gradients are computed. All
            replicas split the same ones. Ignored for another number of micro-batches than the plan's.
        replica_devices: the devices of each further replica of the model, one name a stage. Each micro-batch runs
            through one replica; gradients are summed over replicas.
        prediction: None for a plan written by hand.
        fingerprint: of the profile's layers; empty for a plan written by hand.
        outputs: of the model for one micro-batch, as profiled.
        profile: the layers and their costs at this micro-batch size; None for a plan written by hand.
        alternatives: the other plans that were considered, the fastest first.
        out_of_time: whether ``seconds`` ended the search. With more of them, or on an idle machine, it may find a plan
            with a shorter step.
        constraints: the keywords that the plan was asked for with.
    """

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        faults = _structure_faults(self)
        if faults:
            raise InputError("\n  ".join(faults))
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that :meth:`save` wrote, edited or not. The figures of its stages are computed anew.

        Raises:
            ValueError: the file is not a plan of this version, or the plan is impossible: a layer is missing, unknown
                or in two stages, a stage is not connected, or a device has too little memory. Lists every fault.
            OSError: the file cannot be read.
        """
        read = super().load(path)
        try:
            read = read.refreshed()
        except (ValueError, ArithmeticError) as error:
            faults = fault_texts(error) if isinstance(error, ValidationError) else [str(error)]
            raise InputError(
                f"{path} holds a plan whose costs are too large:\n  " + "\n  ".join(faults)
            ) from None
        faults = _memory_faults(read)
        if faults:
            raise InputError(f"{path} holds a plan that does not fit its devices:\n  " + "\n  ".join(faults))
        return read

    def export(self, engine: str) -> Export:
        """Return the plan in the files of another engine; ``save(folder)`` of the result writes them.

        Args:
            engine: "torch-pipelining", "torchtitan", "megatron" or "deepspeed".

        Raises:
            ValueError: no engine has this name, or the engine cannot run the plan. Lists every reason, and what to plan
                instead.
        """
        return export_plan(self, engine)

    def to_html(self) -> str:
        """Return the plan and its predicted step as an HTML page that needs no other file and no network."""
        return to_html(self)

    def _repr_html_(self) -> str:
        """Show the stages, their memory and the predicted timeline in a notebook."""
        return notebook_html(self)


def _structure_faults(plan: PlanRecord) -> list[str]:
    """Faults of the stages, their devices and the schedule."""
    layers = _layer_faults(plan)
    faults = [*_device_faults(plan), *layers]
    faults += [] if faults else _offload_faults(plan)
    profile = plan.profile
    if profile is None:
        faults += _schedule_faults(plan)
        if plan.prediction and len(plan.prediction.memory_bytes) != len(plan.cluster):
            faults.append(
                f"the prediction has the memory of {len(plan.prediction.memory_bytes)} devices, there are "
                f"{len(plan.cluster)}"
            )
        return faults
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
    return faults if layers else faults + _order_faults(plan.stages, profile.layers)


def _memory_faults(plan: PlanRecord) -> list[str]:
    """Devices with less memory than the plan needs. The figures of the stages must be up to date."""
    faults, stages = [], plan.all_stages
    for name, need in plan.device_bytes().items():
        limit = plan.cluster.device(name).memory_bytes
        if limit is not None and need > limit:
            own = {index % len(plan.stages) for index, stage in enumerate(stages) if stage.device == name}
            faults.append(
                f"device {name!r} (stage {', '.join(map(str, sorted(own)))}) is short by "
                f"{counted(need - limit, 'byte')}: it needs {need} ({format_bytes(need)}) and has {limit} "
                f"({format_bytes(limit)})"
            )
    return faults


def _device_faults(plan: PlanRecord) -> list[str]:
    known = [device.name for device in plan.cluster.devices]
    replicas = [[stage.device for stage in plan.stages], *plan.replica_devices]
    return [
        f"stage {index}{_of_replica(replica)} is on device {name!r}, the cluster has {known}"
        for replica, names in enumerate(replicas)
        for index, name in enumerate(names)
        if name not in known
    ]


def _layer_faults(plan: PlanRecord) -> list[str]:
    """Layers in several stages, in none, or not of the model."""
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
        f"stage {where[0]} has layer {name!r}, which the model does not have"
        for name, where in places.items()
        if name not in known
    ]
    return faults + [f"layer {name!r} is in no stage" for name in known if name not in places]


def _offload_faults(plan: PlanRecord) -> list[str]:
    """Stages that offload and recompute, or whose devices cannot offload."""
    faults = []
    for number, stage in enumerate(plan.stages):
        if stage.offload == "never":
            continue
        if stage.recompute != "never":
            faults.append(
                f"stage {number} offloads its stash and recomputes it (recompute={stage.recompute!r}): choose one"
            )
        for name in (stage.device, *(devices[number] for devices in plan.replica_devices)):
            device = plan.cluster.device(name)
            if device.host_bandwidth is None and device.torch_device != "cpu":
                faults.append(
                    f"stage {number} offloads its stash, and the bandwidth between {name!r} and its host is not known: "
                    "set host_bandwidth of the device, as Cluster.parse(..., host_link='25GB/s') does"
                )
    return faults


def _schedule_faults(plan: PlanRecord) -> list[str]:
    searched = plan.schedule == SEARCH
    if not searched and plan.schedule not in schedules.names():
        return [f"no schedule is called {plan.schedule!r}: there are {', '.join(schedules.names())}"]
    if plan.actions and not searched:
        return [f"schedule {plan.schedule!r} determines its own actions: remove them, or write {SEARCH!r}"]
    if not searched and len(plan.stages) % plan.chunks:
        return [f"{counted(len(plan.stages), 'stage')} are not {plan.chunks} (chunks) for each device"]
    try:
        built = plan.model_copy(update={"split_critical": ()}).build_schedule()
    except schedules.ScheduleError as error:
        return [f"schedule {plan.schedule!r} does not exist for this plan: {error}"]
    sent = [str(one) for row in built.actions for one in row if one.kind in COMMUNICATION]
    if sent:
        return [f"actions has {sent[0]}: remove all sends and receives, a Pipeline adds them itself"]
    if built.model_stages != len(plan.stages):
        return [
            f"schedule {plan.schedule!r} has {built.model_stages} stages, the plan has {len(plan.stages)}"
        ]
    if replica_faults := _replica_faults(plan):
        return replica_faults
    if built.versions and any(stage.offload != "never" for stage in plan.stages):
        return [
            f"schedule {plan.schedule!r} is asynchronous: its stages keep versions of their weights, and cannot "
            "offload; set offload='never'"
        ]
    if plan.split_critical and built.versions:
        return [
            f"schedule {plan.schedule!r} is asynchronous: its backwards cannot be split, empty split_critical"
        ]
    try:
        plan.build_schedule()
    except schedules.ScheduleError as error:
        return [f"split_critical names what is no full backward: {error}; remove it"]
    return _row_faults(plan, built.device_of)


def _replica_faults(plan: PlanRecord) -> list[str]:
    faults = [
        f"replica {replica} of the model has {counted(len(names), 'device')}, it needs one for each of the "
        f"{counted(len(plan.stages), 'stage')}"
        for replica, names in enumerate(plan.replica_devices, 1)
        if len(names) != len(plan.stages)
    ]
    if plan.replicas > plan.micro_batches:
        faults.append(
            f"{plan.replicas} replicas of the model cannot share {counted(plan.micro_batches, 'micro-batch', 'es')}"
        )
    return faults


def _row_faults(plan: PlanRecord, device_of: Sequence[int]) -> list[str]:
    """Stages that the schedule has on one device and the plan on two, or the other way round."""
    replicas = [[stage.device for stage in plan.stages], *plan.replica_devices]
    per_replica = len(device_of) // len(replicas)
    faults: list[str] = []
    taken: dict[str, str] = {}
    for replica, devices in enumerate(replicas):
        rows: dict[int, list[int]] = {}
        for stage, row in zip(range(len(devices)), device_of[replica * per_replica :], strict=False):
            rows.setdefault(row, []).append(stage)
        for own in rows.values():
            first = devices[own[0]]
            faults += [
                f"schedule {plan.schedule!r} has stages {own[0]} and {stage}{_of_replica(replica)} on one device, "
                f"the plan has them on {first!r} and {devices[stage]!r}"
                for stage in own
                if devices[stage] != first
            ]
            if first in taken:
                faults.append(
                    f"stages {taken[first]} and {own[0]}{_of_replica(replica)} are both on device {first!r}, "
                    f"schedule {plan.schedule!r} has them on two"
                )
            taken.setdefault(first, f"{own[0]}{_of_replica(replica)}")
    return faults


def _of_replica(replica: int) -> str:
    return f" of replica {replica}" if replica else ""


def _order_faults(stages: Sequence[StagePlan], layers: Sequence[LayerInfo]) -> list[str]:
    """Stages that are not consecutive layers, and stages in another order than the model runs them."""
    index = {info.name: position for position, info in enumerate(layers)}
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.layers}
    faults = []
    for number, stage in enumerate(stages):
        places = [index[name] for name in stage.layers]
        first, last = min(places), max(places)
        if places != sorted(places):
            faults.append(f"stage {number} has its layers in another order than the model runs them")
        between = [info.name for info in layers[first:last] if stage_of[info.name] != number]
        if between:
            faults.append(
                f"stage {number} is not connected: {between[0]!r} of stage {stage_of[between[0]]} runs between its "
                f"layers {layers[first].name!r} and {layers[last].name!r}"
            )
    if faults:
        return faults
    firsts = [index[stage.layers[0]] for stage in stages]
    return [
        f"stage {number} stands before stage {number - 1} in the model: its layer {stages[number].layers[0]!r} "
        f"runs before {stages[number - 1].layers[0]!r}"
        for number in range(1, len(stages))
        if firsts[number] < firsts[number - 1]
    ]
