"""Checks of a plan, which may come from an edited file: its layers, devices, schedule and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import schedules

from ...cluster import Cluster
from ...profiling import Profile
from ...units import counted, format_bytes
from .searched_order import SEARCH, StepOrder, build_order
from .stage_plan import StagePlan

Devices = Sequence[Sequence[str]]  # the device name of each stage, for each replica


def structure_faults(
    stages: Sequence[StagePlan], devices: Devices, cluster: Cluster, order: StepOrder, profile: Profile | None
) -> Iterator[str]:
    """Yield one message per fault in the layers, devices and schedule of a plan."""
    known = [device.name for device in cluster.devices]
    unknown = [
        f"stage {stage}{_of_replica(replica)} is on device {name!r}, the cluster has {known}"
        for replica, names in enumerate(devices)
        for stage, name in enumerate(names)
        if name not in known
    ]
    yield from unknown or _offload_faults(stages, devices, cluster)
    yield from _layer_faults(stages, profile)
    measured = [costs.micro_batches for costs in profile.costs] if profile else [order.micro_batches]
    if order.micro_batches in measured:
        yield from _schedule_faults(stages, devices, order)
    else:
        yield f"micro_batches is {order.micro_batches}, and the costs in the plan are those of {measured}: plan again"


def memory_faults(
    needs: Mapping[str, int], all_stages: Sequence[StagePlan], stages: int, cluster: Cluster
) -> Iterator[str]:
    """Yield one message per device that lacks memory.

    Args:
        needs: device name -> bytes at its peak.
        all_stages: the stages of all replicas.
        stages: number of stages of a replica.
        cluster: the devices.
    """
    for name, need in needs.items():
        limit = cluster.device(name).memory_bytes
        if limit is not None and need > limit:
            numbers = sorted({at % stages for at, stage in enumerate(all_stages) if stage.device == name})
            yield (
                f"device {name!r} (stage {', '.join(map(str, numbers))}) is short by {counted(need - limit, 'byte')}: "
                f"it needs {need} ({format_bytes(need)}) and has {limit} ({format_bytes(limit)})"
            )


def _layer_faults(stages: Sequence[StagePlan], profile: Profile | None) -> Iterator[str]:
    """Yield layers that are in several stages, in none, not in the model, or in another order than in the model."""
    places: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for name in stage.layers:
            places.setdefault(name, []).append(number)
    known = [info.name for info in profile.layers] if profile else list(places)
    for name, numbers in places.items():
        if len(numbers) > 1:
            yield f"layer {name!r} is there {len(numbers)} times: in stages {', '.join(map(str, numbers))}"
        if name not in known:
            yield f"stage {numbers[0]} has layer {name!r}, which the model does not have"
    yield from (f"layer {name!r} is in no stage" for name in known if name not in places)
    for name, expected in zip(places, known, strict=False):
        if name != expected and places.keys() == set(known):
            yield (
                f"stage {places[name][0]} has layer {name!r} where the model runs {expected!r}: stages are consecutive "
                "layers, in the order in which the model runs them"
            )
            return


def _offload_faults(stages: Sequence[StagePlan], devices: Devices, cluster: Cluster) -> Iterator[str]:
    """Yield stages that offload and recompute, or whose devices cannot offload."""
    for number, stage in enumerate(stages):
        if stage.offload == "never":
            continue
        if stage.recompute != "never":
            yield f"stage {number} offloads its stash and recomputes it (recompute={stage.recompute!r}): choose one"
        for name in (names[number] for names in devices if number < len(names)):
            device = cluster.device(name)
            if device.host_bandwidth is None and device.torch_device != "cpu":
                yield (
                    f"stage {number} offloads its stash, and the bandwidth between {name!r} and its host is not known: "
                    "set host_bandwidth of the device, as Cluster.parse(..., host_link='25GB/s') does"
                )


def _schedule_faults(stages: Sequence[StagePlan], devices: Devices, order: StepOrder) -> Iterator[str]:
    """Yield why the schedule cannot be built, or where its devices differ from those of the plan."""
    name, searched = order.schedule, order.schedule == SEARCH
    if not searched and name not in schedules.names():
        yield f"no schedule is called {name!r}: there are {', '.join(schedules.names())}"
        return
    if order.actions and not searched:
        yield f"schedule {name!r} determines its own actions: remove them, or write {SEARCH!r}"
        return
    if not searched and len(stages) % order.chunks:
        yield f"{counted(len(stages), 'stage')} are not {order.chunks} (chunks) for each device"
        return
    try:
        built = build_order(order)
    except schedules.ScheduleError as error:
        yield f"schedule {name!r} does not exist for this plan: {error}"
        return
    faults = [*_stage_faults(stages, name, built)]
    faults += [
        f"replica {replica} of the model has {counted(len(names), 'device')}, it needs one for each of the "
        f"{counted(len(stages), 'stage')}"
        for replica, names in enumerate(devices)
        if len(names) != len(stages)
    ]
    if order.replicas > order.micro_batches:
        count = counted(order.micro_batches, "micro-batch", "es")
        faults.append(f"{order.replicas} replicas of the model cannot share {count}")
    yield from faults or _placement_faults(devices, name, built.device_of)


def _stage_faults(stages: Sequence[StagePlan], name: str, schedule: schedules.Schedule) -> Iterator[str]:
    """Yield why these stages cannot run under the schedule with this name."""
    if schedule.model_stages != len(stages):
        yield f"schedule {name!r} has {schedule.model_stages} stages, the plan has {len(stages)}"
    elif schedule.versions and any(stage.offload != "never" for stage in stages):
        yield (
            f"schedule {name!r} is asynchronous: its stages keep versions of their weights, and cannot offload; set "
            "offload='never'"
        )


def _placement_faults(devices: Devices, schedule: str, device_of: Sequence[int]) -> Iterator[str]:
    """Yield stages that share a device in the schedule but not in the plan, or in the plan but not in the schedule."""
    per_replica = len(device_of) // len(devices)
    row_of: dict[str, tuple[int, str]] = {}  # device name -> its row in the schedule, and its first stage
    name_of: dict[int, tuple[str, int]] = {}
    for replica, names in enumerate(devices):
        for stage, (name, row) in enumerate(zip(names, device_of[replica * per_replica :], strict=False)):
            first_name, first = name_of.setdefault(row, (name, stage))
            if first_name != name:
                yield (
                    f"schedule {schedule!r} has stages {first} and {stage}{_of_replica(replica)} on one device, the "
                    f"plan has them on {first_name!r} and {name!r}"
                )
                continue
            first_row, first_stage = row_of.setdefault(name, (row, f"{stage}{_of_replica(replica)}"))
            if first_row != row:
                yield (
                    f"stages {first_stage} and {stage}{_of_replica(replica)} are both on device {name!r}, schedule "
                    f"{schedule!r} has them on two"
                )


def _of_replica(replica: int) -> str:
    return f" of replica {replica}" if replica else ""
