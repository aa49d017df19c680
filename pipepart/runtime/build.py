"""Builds the stages of a plan from the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from ..cluster import Device
from ..planning import Plan
from .compiled import CompileOptions, compile_options
from .failure.nonfinite import StageGuard
from .stage import Stage
from .state.replicas import replicate
from .state.shadow import Layers
from .state.shared_parameters import SharedParameters, check_shared, share_parameters


def build_stages(
    layers: Layers,
    plan: Plan,
    compile: CompileOptions = False,
    apart: bool = False,
) -> list[Stage]:
    """Return the stages of the plan, with their layers moved to their devices.

    Args:
        layers: of the model, in order.
        plan: has the cut.
        compile: whether layers are compiled, or keywords for torch.compile.
        apart: whether each virtual device has tensors of its own, although all share the host's memory.

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
    homes = [torch.device(device.torch_device or "cpu") for device in plan.devices]
    _move(groups, homes)
    shared: Sequence[SharedParameters] = share_parameters(
        groups, homes, _names(plan.devices) if apart else None
    )
    guarded = any(stage.recompute != "never" for stage in plan.stages)
    schedule, workers = plan.build_schedule(), plan.workers
    count = len(groups)
    stages: list[Stage] = []
    for replica in range(schedule.replicas):
        devices = plan.devices
        if replica:
            devices = [workers[row] for row in schedule.device_of[replica * count :][:count]]
            homes = [torch.device(device.torch_device or "cpu") for device in devices]
            shared = replicate(groups, homes, len(stages))
        for index, (own, device, home) in enumerate(zip(shared, devices, homes, strict=True)):
            number = replica * count + index
            stages.append(Stage(number, own, starts[index], home, device.name, guarded, options))
    return stages


def guard_stages(stages: Sequence[Stage]) -> None:
    """Check the numbers that stages make from now on; ``stages`` are those of all replicas."""
    in_model = sum(stage.replica is None for stage in stages)
    for number, stage in enumerate(stages):
        place = number % in_model
        where = f"stage {place} of {in_model} on {stage.where}"
        stage.guard = StageGuard(stage.layers, stage.first, where, is_last=place == in_model - 1)


def _names(devices: Sequence[Device]) -> list[str] | None:
    """Return the names that distinguish virtual devices, which are one device for torch; None for real devices."""
    virtual = all(torch.device(device.torch_device or "cpu").type == "cpu" for device in devices)
    return [device.name for device in devices] if virtual else None


def _move(groups: Sequence[Layers], homes: Sequence[torch.device]) -> None:
    """Move each group of layers to its device. Tensors shared by several groups go to the device of the first."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for home, layers in zip(reversed(homes), reversed(groups), strict=True):
        for _, module in layers:
            for part in module.modules():
                _move_to_unlike(part, home, replaced)
            module.to(home)


def _move_to_unlike(part: nn.Module, home: torch.device, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
    """Move parameters to a device for which torch would create new parameter objects.

    The parameters stay the objects that optimizers hold. A parameter that a graph holds is replaced in all layers that
    share it.
    """
    there = torch.empty((), device=home)
    for key, parameter in part._parameters.items():
        if parameter is None or _set_in_place(parameter, there):
            continue
        if parameter not in replaced:
            gradient, parameter.grad = parameter.grad, None
            hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            moved = nn.Parameter(parameter.detach().to(home), parameter.requires_grad)
            moved.grad = None if gradient is None else gradient.to(home)
            try:
                torch.utils.swap_tensors(parameter, moved)
            except RuntimeError:
                parameter.grad = gradient
                replaced[parameter] = moved
            now = replaced.get(parameter, parameter)
            now._backward_hooks, now._post_accumulate_grad_hooks = hooks  # a swap would not move them
        part._parameters[key] = replaced.get(parameter, parameter)


def _set_in_place(tensor: Tensor, there: Tensor) -> bool:
    """Return True if torch can set ``.data`` to a tensor of the other device, as between CPU and CUDA."""
    return torch._has_compatible_shallow_copy_type(tensor, there)  # type: ignore[attr-defined]


def _check_schedule(plan: Plan) -> None:
    schedule = plan.build_schedule()
    if schedule.model_stages != len(plan.stages):
        raise ValueError(
            f"{len(plan.stages)} stages are not {plan.chunks} for each device: "
            f"schedule {plan.schedule!r} with chunks={plan.chunks} has {schedule.model_stages}"
        )
    homes: dict[int, int] = {}
    for index, row in enumerate(schedule.device_of[: len(plan.stages)]):
        first = homes.setdefault(row, index)
        here, there = plan.stages[index].device, plan.stages[first].device
        if here != there:
            raise ValueError(
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
    raise ValueError(
        "the plan was not made for this model: " + ("; ".join(faults) or "its layers are in another order")
        + ". Profile the model and plan again"
    )  # fmt: skip


def _check_devices(plan: Plan) -> None:
    for device in plan.workers:
        if device.torch_device is None:
            raise ValueError(
                f"device {device.name!r} is only described, nothing can run on it: "
                "plan for Cluster.local() or Cluster.virtual(n) to train"
            )
