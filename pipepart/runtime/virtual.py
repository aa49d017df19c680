"""The conditions that a plan's virtual devices are put under."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..planning import Plan
from .conditions import Condition
from .emulated import Emulated
from .stage import Stage
from .strict import MemoryUse, Strict


def conditions_of(plan: Plan, stages: Sequence[Stage], loss: object, strict: bool) -> list[Condition]:
    """None for devices that are real, which are strict and as fast as they are by themselves.

    Raises:
        torch.OutOfMemoryError: ``strict``, and a device has no room for its parameters.
    """
    if any(torch.device(device.torch_device or "cpu").type != "cpu" for device in plan.workers):
        return []
    found: list[Condition] = [Emulated(plan)] if plan.cluster.emulated else []
    return [*found, Strict(plan, stages, loss)] if strict else found


def memory_of(conditions: Sequence[Condition]) -> dict[str, MemoryUse]:
    """What is in use on each device, by its name.

    Raises:
        RuntimeError: nobody counts.
    """
    for condition in conditions:
        if isinstance(condition, Strict):
            return condition.memory()
    raise RuntimeError(
        "memory is counted on virtual devices whose pipeline is made with strict=True: "
        "Pipeline(model, plan, ..., strict=True); accelerators count theirs themselves"
    )
