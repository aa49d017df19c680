"""Makes the stages of a plan from the layers of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..capture import flatten, state_of
from ..planning import Plan
from .stage import Stage


def build_stages(model: nn.Module, plan: Plan) -> list[Stage]:
    """The plan's stages, the layers of each on its device.

    Raises:
        TypeError: the model is no ``nn.Sequential``.
        ValueError: the plan's layers are not the model's in their order, a device is only described, or layers that
            share parameters or buffers are in different stages.
    """
    layers = flatten(model)
    _check_layers([name for name, _ in layers], plan)
    _check_devices(plan)
    stages = []
    first = 0
    for index, (planned, device) in enumerate(zip(plan.stages, plan.devices, strict=True)):
        own = layers[first : first + len(planned.layers)]
        stages.append(Stage(index, own, first, torch.device(device.torch_device or "cpu"), device.name))
        first += len(planned.layers)
    _check_sharing(stages)
    for stage in stages:
        for _, module in stage.layers:
            module.to(stage.device)
    return stages


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
    for device in plan.devices:
        if device.torch_device is None:
            raise ValueError(
                f"device {device.name!r} is only described, nothing can run on it: "
                "plan for Cluster.local() or Cluster.virtual(n) to train"
            )


def _check_sharing(stages: list[Stage]) -> None:
    owners: dict[Tensor, tuple[int, str]] = {}
    for stage in stages:
        for name, module in stage.layers:
            for tensor in state_of(module):
                owner, other = owners.setdefault(tensor, (stage.index, name))
                if owner != stage.index:
                    raise ValueError(
                        f"layers {other!r} (stage {owner}) and {name!r} (stage {stage.index}) share a parameter or "
                        "buffer: put them in one stage"
                    )
