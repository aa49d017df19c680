"""Checks of a plan, which may come from an edited file: its layers, devices, schedule and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import schedules

from ...profiling import Profile
from ...units import counted, format_bytes
from .plan_record import PlanRecord
from .searched_order import SEARCH


def structure_faults(plan: PlanRecord) -> Iterator[str]:
    """Yield one message per fault in the layers, devices and schedule of a plan."""
    layers, devices = list(_layer_faults(plan)), list(_device_faults(plan))
    yield from (*devices, *layers)
    if not devices and not layers:
        yield from _offload_faults(plan)
    profile = plan.profile
    measured = [costs.micro_batches for costs in profile.costs] if profile else [plan.micro_batches]
    if plan.micro_batches in measured:
        yield from _schedule_faults(plan)
    else:
        yield f"micro_batches is {plan.micro_batches}, and the costs in the plan are those of {measured}: plan again"
    if profile is not None:
        yield from _profile_faults(plan, profile)
    elif plan.prediction and len(plan.prediction.memory_bytes) != len(plan.cluster):
        yield (
            f"the prediction has the memory of {len(plan.prediction.memory_bytes)} devices, there are "
            f"{len(plan.cluster)}"
        )


def memory_faults(plan: PlanRecord) -> Iterator[str]:
    """Yield one message per device that lacks memory. The predictions of the stages must be up to date."""
    for name, need in plan.device_bytes().items():
        limit = plan.cluster.device(name).memory_bytes
        if limit is not None and need > limit:
            stages = (
                at % len(plan.stages) for at, stage in enumerate(plan.all_stages) if stage.device == name
            )
            yield (
                f"device {name!r} (stage {', '.join(map(str, sorted(set(stages))))}) is short by "
                f"{counted(need - limit, 'byte')}: it needs {need} ({format_bytes(need)}) and has {limit} "
                f"({format_bytes(limit)})"
            )


def _replicas(plan: PlanRecord) -> list[Sequence[str]]:
    """Return the device names of the stages, for each replica."""
    return [[stage.device for stage in plan.stages], *plan.replica_devices]


def _of_replica(replica: int) -> str:
    return f" of replica {replica}" if replica else ""


def _device_faults(plan: PlanRecord) -> Iterator[str]:
    known = [device.name for device in plan.cluster.devices]
    for replica, names in enumerate(_replicas(plan)):
        for stage, name in enumerate(names):
            if name not in known:
                yield f"stage {stage}{_of_replica(replica)} is on device {name!r}, the cluster has {known}"


def _layer_faults(plan: PlanRecord) -> Iterator[str]:
    """Yield a message for each layer that is in several stages, in none, or not in the model."""
    places: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        for name in stage.layers:
            places.setdefault(name, []).append(number)
    for name, numbers in places.items():
        if len(numbers) > 1:
            yield f"layer {name!r} is there {len(numbers)} times: in stages {', '.join(map(str, numbers))}"
    if plan.profile is None:
        return
    known = dict.fromkeys(info.name for info in plan.profile.layers)
    for name, numbers in places.items():
        if name not in known:
            yield f"stage {numbers[0]} has layer {name!r}, which the model does not have"
    yield from (f"layer {name!r} is in no stage" for name in known if name not in places)


def _profile_faults(plan: PlanRecord, profile: Profile) -> Iterator[str]:
    """Yield differences between plan and profile: fingerprint, outputs, and order of the layers."""
    if plan.fingerprint and plan.fingerprint != profile.fingerprint:
        yield "the layers in the plan's profile are not those that it was made for: plan again"
    if plan.outputs and plan.outputs != profile.outputs:
        yield "the outputs of the plan are not those of its profile: plan again"
    planned = [(number, name) for number, stage in enumerate(plan.stages) for name in stage.layers]
    known = [info.name for info in profile.layers]
    if sorted(known) != sorted(name for _, name in planned):
        return  # reported by _layer_faults
    for (number, name), expected in zip(planned, known, strict=True):
        if name != expected:
            yield (
                f"stage {number} has layer {name!r} where the model runs {expected!r}: stages are consecutive layers, "
                "in the order in which the model runs them"
            )
            return


def _offload_faults(plan: PlanRecord) -> Iterator[str]:
    """Yield stages that offload and recompute, or whose devices cannot offload."""
    for number, stage in enumerate(plan.stages):
        if stage.offload == "never":
            continue
        if stage.recompute != "never":
            yield f"stage {number} offloads its stash and recomputes it (recompute={stage.recompute!r}): choose one"
        for name in (stage.device, *(devices[number] for devices in plan.replica_devices)):
            device = plan.cluster.device(name)
            if device.host_bandwidth is None and device.torch_device != "cpu":
                yield (
                    f"stage {number} offloads its stash, and the bandwidth between {name!r} and its host is not known: "
                    "set host_bandwidth of the device, as Cluster.parse(..., host_link='25GB/s') does"
                )


def _schedule_faults(plan: PlanRecord) -> Iterator[str]:
    """Yield why the schedule cannot be built, or where its devices differ from those of the plan."""
    name, searched = plan.schedule, plan.schedule == SEARCH
    if not searched and name not in schedules.names():
        yield f"no schedule is called {name!r}: there are {', '.join(schedules.names())}"
        return
    if plan.actions and not searched:
        yield f"schedule {name!r} determines its own actions: remove them, or write {SEARCH!r}"
        return
    if not searched and len(plan.stages) % plan.chunks:
        yield f"{counted(len(plan.stages), 'stage')} are not {plan.chunks} (chunks) for each device"
        return
    try:
        whole = plan.model_copy(update={"split_critical": ()}).build_schedule()
    except schedules.ScheduleError as error:
        yield f"schedule {name!r} does not exist for this plan: {error}"
        return
    faults = [*_action_faults(plan, whole), *_replica_faults(plan)]
    yield from faults or _row_faults(plan, whole.device_of)


def _action_faults(plan: PlanRecord, whole: schedules.Schedule) -> Iterator[str]:
    """Yield faults in ``actions`` and ``split_critical`` of a plan.

    Args:
        plan: to check.
        whole: its schedule, with whole backwards.
    """
    if whole.model_stages != len(plan.stages):
        yield f"schedule {plan.schedule!r} has {whole.model_stages} stages, the plan has {len(plan.stages)}"
    elif whole.versions:
        asynchronous = f"schedule {plan.schedule!r} is asynchronous: its"
        if any(stage.offload != "never" for stage in plan.stages):
            yield f"{asynchronous} stages keep versions of their weights, and cannot offload; set offload='never'"
        if plan.split_critical:
            yield f"{asynchronous} backwards cannot be split, empty split_critical"
    elif plan.split_critical:
        try:
            plan.build_schedule()
        except schedules.ScheduleError as error:
            yield f"split_critical names what is no full backward: {error}; remove it"


def _replica_faults(plan: PlanRecord) -> Iterator[str]:
    for replica, names in enumerate(plan.replica_devices, 1):
        if len(names) != len(plan.stages):
            yield (
                f"replica {replica} of the model has {counted(len(names), 'device')}, it needs one for each of the "
                f"{counted(len(plan.stages), 'stage')}"
            )
    if plan.replicas > plan.micro_batches:
        yield f"{plan.replicas} replicas of the model cannot share {counted(plan.micro_batches, 'micro-batch', 'es')}"


def _row_faults(plan: PlanRecord, device_of: Sequence[int]) -> Iterator[str]:
    """Yield stages that share a device in the schedule but not in the plan, or in the plan but not in the schedule."""
    schedule, stage_on = f"schedule {plan.schedule!r}", dict[str, str]()
    per_replica = len(device_of) // plan.replicas
    for replica, devices in enumerate(_replicas(plan)):
        rows: dict[int, list[int]] = {}
        for stage, row in zip(range(len(devices)), device_of[replica * per_replica :], strict=False):
            rows.setdefault(row, []).append(stage)
        for first, *later in rows.values():
            name, of_replica = devices[first], _of_replica(replica)
            for stage in later:
                if devices[stage] != name:
                    yield (
                        f"{schedule} has stages {first} and {stage}{of_replica} on one device, "
                        f"the plan has them on {name!r} and {devices[stage]!r}"
                    )
            if name in stage_on:
                yield (
                    f"stages {stage_on[name]} and {first}{of_replica} are both on device {name!r}, "
                    f"{schedule} has them on two"
                )
            stage_on.setdefault(name, f"{first}{of_replica}")
