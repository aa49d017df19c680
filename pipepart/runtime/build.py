"""Builds the stages of a plan from the layers of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

import torch

from ..cluster import Device
from ..input_error import InputError
from ..planning import Plan
from .compiled import CompileOptions, compile_options
from .placing import InitialValues, Places, move, release
from .stage import Stage
from .state.replicas import replicate
from .state.shadow import Layers
from .state.shared_parameters import SharedParameters, check_shared, share_parameters


def build_stages(
    layers: Layers,
    plan: Plan,
    compile: CompileOptions = False,
    apart: bool = False,
    values: InitialValues | None = None,
    local: Collection[int] | None = None,
    replica: int | None = None,
) -> list[Stage]:
    """Return the stages of the plan, with their layers moved to their devices.

    Args:
        layers: of the model, in order.
        plan: has the cut.
        compile: whether layers are compiled, or keywords for torch.compile.
        apart: whether each virtual device has tensors of its own, although all share the host's memory.
        values: of a model that is on the meta device.
        local: the stages of the plan that this process runs; None for all. The layers of the others have no memory
            afterwards: their parameters and buffers are on the meta device.
        replica: whose stages this process runs, with the user's own layers; None if it runs all replicas, of which all
            but the first have copies of the layers.

    Raises:
        TypeError: ``compile`` has keywords unknown to torch.compile.
        ValueError: the plan's layers differ from the model's, a device is only described, layers in different stages
            share a buffer that they write, or the schedule places stages on other devices than the plan. Nothing has
            been moved then.
    """
    options = compile_options(compile, plan)
    _check_schedule(plan)
    _check_layers([name for name, _ in layers], plan)
    _check_devices(plan)
    starts = list(accumulate((len(stage.layers) for stage in plan.stages), initial=0))
    groups = [layers[start:end] for start, end in pairwise(starts)]
    check_shared(groups, plan.asynchronous)
    schedule, workers = plan.build_schedule(), plan.workers
    count = len(groups)
    devices_of = [
        [workers[row] for row in schedule.device_of[replica_number * count :][:count]]
        for replica_number in range(schedule.replicas)
    ]
    homes = _homes(devices_of[replica or 0])
    here = range(len(groups)) if local is None else sorted(local)
    places = Places.of(groups, homes, here)
    if values is not None:
        values.fill(places)
    release(groups, places.foreign)
    move([groups[stage] for stage in here], [homes[stage] for stage in here])
    shared: Sequence[SharedParameters] = share_parameters(
        groups, homes, _names(plan.devices) if apart else None, local, (replica or 0) * count
    )
    guarded = any(stage.recompute != "never" for stage in plan.stages)
    stages: list[Stage] = []
    for replica_number, devices in enumerate(devices_of):
        homes = _homes(devices)
        if replica_number and replica is None:
            shared = replicate(groups, homes, len(stages))
        for index, (parameters, device, home) in enumerate(zip(shared, devices, homes, strict=True)):
            number = replica_number * count + index
            stages.append(Stage(number, parameters, starts[index], home, device.name, guarded, options))
    return stages


def _homes(devices: Sequence[Device]) -> list[torch.device]:
    return [torch.device(device.torch_device or "cpu") for device in devices]


def _names(devices: Sequence[Device]) -> list[str] | None:
    """Return the names that distinguish virtual devices, which are one device for torch; None for real devices."""
    virtual = all(torch.device(device.torch_device or "cpu").type == "cpu" for device in devices)
    return [device.name for device in devices] if virtual else None


def _check_schedule(plan: Plan) -> None:
    schedule = plan.build_schedule()
    if schedule.model_stages != len(plan.stages):
        raise InputError(
            f"{len(plan.stages)} stages are not {plan.chunks} for each device: "
            f"schedule {plan.schedule!r} with chunks={plan.chunks} has {schedule.model_stages}"
        )
    homes: dict[int, int] = {}
    for index, row in enumerate(schedule.device_of[: len(plan.stages)]):
        first = homes.setdefault(row, index)
        here, there = plan.stages[index].device, plan.stages[first].device
        if here != there:
            raise InputError(
                f"stage {index} is on {here!r}: schedule {plan.schedule!r} runs it beside stage {first}, "
                f"which is on {there!r}"
            )


def _check_layers(names: list[str], plan: Plan) -> None:
    planned = [name for stage in plan.stages for name in stage.layers]
    if planned == names:
        return
    missing = [name for name in names if name not in planned]
    unknown = [name for name in planned if name not in names]
    faults = [
        f"{what} {', '.join(map(repr, which))}"
        for what, which in (("it leaves out layers", missing), ("the model has no layers", unknown))
        if which
    ]
    raise InputError(
        "the plan was not made for this model: " + ("; ".join(faults) or "its layers are in another order")
        + ". Profile the model and plan again"
    )  # fmt: skip


def _check_devices(plan: Plan) -> None:
    for device in plan.workers:
        if device.torch_device is None:
            raise InputError(
                f"device {device.name!r} is only described, nothing can run on it: "
                "plan for Cluster.local() or Cluster.virtual(n) to train"
            )
