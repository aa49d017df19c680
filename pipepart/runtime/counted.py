"""Tells the faithful virtual devices what their memory is for, as their allocators only know how much it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from schedules import Action, Kind, Schedule

from .. import faithful
from ..planning import Plan
from .conditions import Condition, Do
from .stage import Stage
from .strict import GRADIENTS, OPTIMIZER, PARAMETERS, MemoryUse

_BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W, Kind.REDUCE_GRAD})
_TYPE = "vdev"


class Counted(Condition):
    """The memory of a pipeline's faithful virtual devices, by what it is for.

    Args:
        plan: has the devices.
        stages: in the order of its schedule.
    """

    def __init__(self, plan: Plan, stages: Sequence[Stage]) -> None:
        self._homes = {d.name: torch.device(d.torch_device) for d in plan.workers if d.torch_device}
        self._stages = stages
        self.begin(())

    @staticmethod
    def suits(plan: Plan) -> bool:
        """Whether all devices are such."""
        return all(torch.device(device.torch_device or "cpu").type == _TYPE for device in plan.workers)

    def memory(self) -> dict[str, MemoryUse]:
        """What is in use on each device, by its name; what shares a device has the same."""
        found = {name: faithful.memory(home) for name, home in self._homes.items()}
        return {
            name: MemoryUse(use.allocated, use.peak, use.by_category, use.peak_by_category)
            for name, use in found.items()
        }

    def begin(self, optimizers: Sequence[Optimizer | None]) -> None:
        """What the caller has put in the place of parameters, gradients and optimizers' state counts as such."""
        for stage in self._stages:
            for module in _modules(stage):
                _count(module._parameters.values(), PARAMETERS)
                _count(module._buffers.values(), PARAMETERS)
            _count_gradients(stage)
        for optimizer in optimizers:
            if optimizer is not None:
                _count(pytree.tree_leaves(dict(optimizer.state)), OPTIMIZER)

    def doing(self, do: Do, schedule: Schedule) -> Do:
        """Gradients count as such behind the backward that has made them."""

        def done(action: Action) -> None:
            do(action)
            if action.kind in _BACKWARDS:
                _count_gradients(self._stages[action.stage])

        return done


def _count_gradients(stage: Stage) -> None:
    _count(
        (p.grad for module in _modules(stage) for p in module._parameters.values() if p is not None),
        GRADIENTS,
    )


def _count(tensors: Iterable[object], category: str) -> None:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type == _TYPE and tensor.layout is torch.strided:
            faithful.relabel(tensor, category)


def _modules(stage: Stage) -> Iterator[nn.Module]:
    for _, layer in stage.layers:
        yield from layer.modules()
