"""Puts runs under watch: marks what each device has, and follows its workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from schedules import Action, Kind, Schedule

from ...planning import Plan
from ..conditions import Condition, Do
from ..loss_sink import End
from ..stage import Stage
from ..transport.base import Transport
from .ledger import GRADIENTS, OPTIMIZER, PARAMETERS, Ledger, MemoryUse, mark_of, storages
from .messages import Arriving, Here, StrictEnd, StrictTransport
from .watch import Moves, Watch

_OF_LAYERS = frozenset({Kind.F, Kind.RECOMPUTE, Kind.B, Kind.I, Kind.W})  # in which Python of the user's runs
_BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W, Kind.REDUCE_GRAD})
_NOTHING = nullcontext()


class Strict(Condition):
    """Each virtual device is a device of its own.

    Args:
        plan: has the devices.
        stages: in the order of its schedule.
        loss: that is computed behind the last stage, with parameters and buffers if it is a module.

    Raises:
        torch.OutOfMemoryError: a device has no room for its parameters.
    """

    def __init__(self, plan: Plan, stages: Sequence[Stage], loss: object) -> None:
        self._ledgers = [Ledger(device.name, device.memory_bytes) for device in plan.workers]
        self._stages = stages
        self._homes = plan.build_schedule().device_of
        self._loss = loss if isinstance(loss, nn.Module) else None
        self._here = Here()
        layers = [layer for stage in stages for layer in stage.layers]
        layers += [] if self._loss is None else [("the loss", self._loss)]
        self._watches = [Watch(ledger, layers) for ledger in self._ledgers]
        for stage in reversed(
            range(len(stages))
        ):  # what several share is moved to the first, as when they are built
            self._take_home(stage, moved=True)

    def memory(self) -> dict[str, MemoryUse]:
        """What is in use on each device, by its name."""
        return {ledger.device: ledger.use() for ledger in self._ledgers}

    def arriving(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Each part is copied to the device that takes it."""
        return Arriving(parts, self._here)

    def end(self, end: End) -> End:
        """Its gradients are copied to the device that takes them."""
        return StrictEnd(end, self._here)

    def transport(self, inner: Transport, schedule: Schedule) -> Transport:
        """Messages are copied to the device that takes them."""
        return StrictTransport(inner, self._here)

    def doing(self, do: Do, schedule: Schedule) -> Do:
        """All operations of an action are looked at; behind it, what it has made is counted as what it is."""

        def done(action: Action) -> None:
            stage = action.stage
            watch = self._here.watch = self._watches[self._homes[stage]]
            try:
                with watch, Moves(watch) if action.kind in _OF_LAYERS else _NOTHING:
                    do(action)
            finally:
                self._here.watch = None
            if action.kind in _BACKWARDS:
                self._count_gradients(stage)

        return done

    def begin(self, optimizers: Sequence[Optimizer | None]) -> None:
        """What the caller has put in the place of parameters, gradients and optimizers' state gets a home."""
        for stage in range(len(self._stages)):
            self._take_home(stage)
        for stage, optimizer in enumerate(optimizers):
            if optimizer is not None:
                self._count_state(stage, optimizer)

    def _take_home(self, stage: int, moved: bool = False) -> None:
        """What is a stage's and has no home yet lives on its device; with ``moved``, wherever it was before."""
        for module in self._modules(stage):
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._enter(stage, parameter, PARAMETERS, moved)
                    if parameter.grad is not None:
                        self._enter(stage, parameter.grad, GRADIENTS, moved)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._enter(stage, buffer, PARAMETERS, moved)

    def _count_gradients(self, stage: int) -> None:
        for module in self._modules(stage):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.grad is not None:
                    self._enter(stage, parameter.grad, GRADIENTS)

    def _count_state(self, stage: int, optimizer: Optimizer) -> None:
        for tensor in pytree.tree_leaves(dict(optimizer.state)):
            if isinstance(tensor, Tensor):
                self._enter(stage, tensor, OPTIMIZER)

    def _enter(self, stage: int, tensor: Tensor, category: str, moved: bool = False) -> None:
        ledger = self._ledgers[self._homes[stage]]
        for storage in storages(tensor):
            mark = mark_of(storage)
            if mark is not None and mark.ledger is ledger:
                if mark.category != category:
                    ledger.call(mark, category)
            elif mark is None or moved or mark.ledger.device == ledger.device:
                ledger.enter(storage, category, lambda: f"one of the {category} of stage {stage}")

    def _modules(self, stage: int) -> Iterator[nn.Module]:
        for _, layer in self._stages[stage].layers:
            yield from layer.modules()
        if self._loss is not None and stage == len(self._stages) - 1:
            yield from self._loss.modules()
