"""Emulates the memory limits, speeds and links of the plan's cluster on virtual devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from schedules import Kind, Schedule
from schedules.core.action import HOST_COPIES

from ..autograd import graph_cut
from ..planning import Plan
from ..runtime.offload import CopyQueue
from ..runtime.stage import Stage
from ..runtime.transport.threads import Transport
from .device import ExplicitMoves, StrictDevice
from .memory import GRADIENTS, OPTIMIZER, PARAMETERS, Ledger, MemoryUse, storages, tag_of
from .transport import Clock, EmulatedHostLink, EmulatedTransport, StrictTransport

_RUNS_LAYERS = frozenset({Kind.F, Kind.RECOMPUTE, Kind.B, Kind.I, Kind.W})
_MAKES_GRADIENTS = frozenset({Kind.B, Kind.I, Kind.W, Kind.REDUCE_GRAD})
HOST_CLOCK = Clock()


class DeviceEmulation:
    """The emulated devices of one pipeline.

    Args:
        plan: has the devices and the links.
        stages: in the order of the plan's schedule.
        loss: the loss function; the parameters and buffers of a module live on the last stage's device.
        strict: whether each device has tensors of its own and a memory limit.
        local: the workers of this process, whose memory it counts; None for all.
        clock: measures and sleeps, for speeds and links.

    Raises:
        torch.OutOfMemoryError: with ``strict``, the parameters of a device exceed its limit.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        loss: object,
        strict: bool,
        local: Sequence[int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._stages = stages
        self._device_of = plan.build_schedule().device_of
        self._loss = loss if isinstance(loss, nn.Module) else None
        self._clock = clock or HOST_CLOCK
        names = [device.name for device in plan.workers]
        self._speeds = [device.speed if plan.cluster.emulated else 1.0 for device in plan.workers]
        self._links = (
            [[plan.cluster.link_between(sender, receiver) for receiver in names] for sender in names]
            if plan.cluster.emulated
            else None
        )
        self._host_bandwidths = [
            device.host_bandwidth if plan.cluster.emulated else None for device in plan.workers
        ]
        self._message_seconds = plan.cluster.message_seconds
        self._ledgers = [Ledger(device.name, device.memory_bytes) for device in plan.workers]
        self._own = [ledger for row, ledger in enumerate(self._ledgers) if local is None or row in local]
        layers = [layer for stage in stages for layer in stage.layers]
        layers += [] if self._loss is None else [("the loss", self._loss)]
        self._strict = [StrictDevice(ledger, layers) for ledger in self._ledgers] if strict else None
        self.begin(())

    def memory(self) -> dict[str, MemoryUse]:
        """The memory in use by name of each device of this process; empty without ``strict``."""
        return {ledger.device: ledger.use() for ledger in self._own} if self._strict else {}

    def reset_peaks(self) -> None:
        """Begin to look for the peaks of all devices anew."""
        for ledger in self._own:
            ledger.reset_peak()

    def begin(self, optimizers: Sequence[Optimizer | None]) -> None:
        """Assign parameters, gradients and optimizer state to their devices, which the caller may have replaced.

        Called before a run, on the caller's thread. Tensors that several stages share live on the device of the first.
        """
        if self._strict is None:
            return
        torch.clear_autocast_cache()  # casts of weights that the caller has used, which live in the host's memory
        for stage in range(len(self._stages)):
            for module in self._modules(stage):
                self._assign(stage, (*module._parameters.values(), *module._buffers.values()), PARAMETERS)
            self._assign_gradients(stage)
        for stage, optimizer in enumerate(optimizers):
            self._assign(stage, pytree.tree_leaves(dict(optimizer.state)) if optimizer else (), OPTIMIZER)

    def transport(self, inner: Transport, schedule: Schedule) -> Transport:
        """Return the transport of one run, to the memories of strict devices and over emulated links."""
        if self._strict is not None:
            inner = StrictTransport(inner, schedule.device_of, self._strict)
        if self._links is None:
            return inner
        return EmulatedTransport(inner, schedule.device_of, self._links, self._clock, self._message_seconds)

    def around(self, kind: Kind, run: Any, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return the computation of a kind of action of a stage, as :meth:`computing` runs it."""

        def computed(micro_batch: Any, received: Any) -> Any:
            with self.computing(kind, run.index):
                return compute(micro_batch, received)

        return computed

    def copy_queue(self, worker: int, queue: CopyQueue) -> CopyQueue:
        """Return the copies between a device and the host: at the speed of its link, if that is emulated."""
        bandwidth = self._host_bandwidths[worker]
        return queue if bandwidth is None else EmulatedHostLink(bandwidth, self._clock)

    @contextmanager
    def computing(self, kind: Kind, stage: int) -> Iterator[None]:
        """Run an action's computation on its worker, checked if strict and slowed down to the device's speed."""
        device = self._device_of[stage]
        start = self._clock.now()
        if self._strict is None:
            yield
        else:
            strict = self._strict[device]
            graph_cut.emulated.bring = strict.bring
            graph_cut.emulated.to_host = partial(strict.copied, to_host=True)
            try:
                with strict, ExplicitMoves(strict) if kind in _RUNS_LAYERS else nullcontext():
                    yield
            finally:
                graph_cut.emulated.bring = graph_cut.emulated.to_host = None
            if kind in _MAKES_GRADIENTS:
                self._assign_gradients(stage)
        if self._speeds[device] < 1 and kind not in HOST_COPIES:
            self._clock.sleep_until(start + (self._clock.now() - start) / self._speeds[device])

    def _assign_gradients(self, stage: int) -> None:
        for module in self._modules(stage):
            parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
            self._assign(stage, [parameter.grad for parameter in parameters], GRADIENTS)

    def _assign(self, stage: int, values: Iterable[object], category: str) -> None:
        """Count the tensors among values of a stage, unless they live on another device of this pipeline."""
        ledger = self._ledgers[self._device_of[stage]]
        for storage in (
            own_storage for value in values if isinstance(value, Tensor) for own_storage in storages(value)
        ):
            tag = tag_of(storage)
            if tag is None or tag.ledger not in self._ledgers:  # the caller's, or another pipeline's
                ledger.enter(storage, category, lambda: f"one of the {category} of stage {stage}")
            elif tag.ledger is ledger and tag.category != category:
                ledger.relabel(tag, category)

    def _modules(self, stage: int) -> Iterator[nn.Module]:
        for _, layer in self._stages[stage].layers:
            yield from layer.modules()
        if self._loss is not None and stage == len(self._stages) - 1:
            yield from self._loss.modules()


def emulation_of(
    plan: Plan, stages: Sequence[Stage], loss: object, strict: bool, local: Sequence[int] | None = None
) -> DeviceEmulation | None:
    """The emulation that a plan's devices need; None for real devices, and where nothing is to be emulated.

    Raises:
        torch.OutOfMemoryError: with ``strict``, the parameters of a device exceed its limit.
    """
    if any(torch.device(device.torch_device or "cpu").type != "cpu" for device in plan.workers):
        return None
    if not strict and not plan.cluster.emulated:
        return None
    return DeviceEmulation(plan, stages, loss, strict, local)
